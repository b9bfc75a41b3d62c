"""Compare specserve with what a user would pick instead, on one machine: `make bench-peers`.

Each system runs in its own process (`specserve`, `transformers`, `openvino`), which gets its turns
as lines of JSON (`turn`).
"""
