"""`specserve doctor`: what a server needs of the machine, the config and the models; each thing found, and what to do where it is not well."""
