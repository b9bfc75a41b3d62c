"""specserve beside what a user would pick instead, on one machine and in turns: `make bench-peers`.

Each system runs in a process of its own (`ours`, `transformers`, `openvino`) and gets its turns over `turn`'s lines.
"""
