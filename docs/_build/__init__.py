"""Pages that say what the program itself says of its interface: paths, options, keys, metrics. Built by `make docs`, never written by hand."""
