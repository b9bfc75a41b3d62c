"""An engine: its workers, their processes and links, and what watches over them."""
