"""Compare specserve with what a user would pick instead, on one machine.

`python -m lab.bench.peers.install` installs the others, `python -m lab.bench.peers` compares.

In process: `llm` (ours), `transformers`, `openvino`. Over HTTP: `specserve` (ours), `vllm`,
`llama`. Each system runs in its own process, which gets its turns as lines of JSON (`turn`).
"""
