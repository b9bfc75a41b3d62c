"""Reference pages made from the program by `make docs`: paths, options, keys and metrics."""
