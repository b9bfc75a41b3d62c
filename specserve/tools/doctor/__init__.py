"""Check what a server needs of the machine, the config and the models: `specserve doctor`."""
