"""Examples at the end of each command's --help: command lines that work with your own names."""

from __future__ import annotations

EXAMPLES = {
    "serve": """
specserve serve
specserve serve --target meta-llama/Llama-3.1-8B --draft meta-llama/Llama-3.2-1B --tp 2 --port 9000
specserve serve --config my.yaml --set limits.max_running=32 --set speculation.gamma=5
specserve serve --join 10.0.0.1:6379 --name second --set http.root_path=/second
""",
    "generate": """
specserve generate --prompt 'def add(a, b):' --max-tokens 64 --temperature 0
specserve generate --prompt 'What is a monad?' --target meta-llama/Llama-3.1-8B-Instruct \
--draft meta-llama/Llama-3.2-1B-Instruct --gamma 5
specserve generate --prompt 'import os' --seed 1 --json --set cache.page_size=32
specserve generate --prompt 'for x in' --drafter prompt_copy --trace rounds.json
""",
    "doctor": """
specserve doctor
specserve doctor --target meta-llama/Llama-3.1-8B --draft meta-llama/Llama-3.2-1B
specserve doctor --config my.yaml --set http.port=9000 --json
""",
    "bench": """
specserve bench --url http://127.0.0.1:8000
specserve bench --url http://127.0.0.1:8000 --concurrency 16 --html report.html
specserve bench --url http://127.0.0.1:8000 --rate 2.5 --requests 200 --gamma 0 --json plain.json
""",
    "tables": """
specserve tables --tokenizer meta-llama/Llama-3.1-8B --text corpus.txt --out tables.safetensors
specserve tables --tokenizer path/to/target --text one.txt two.txt --out DIR/tables.safetensors \
--keep 128
""",
    "plan": """
specserve plan --alpha 0.75 --cost 0.05
specserve plan --target meta-llama/Llama-3.1-8B --draft meta-llama/Llama-3.2-1B --measure \
--text held-out.txt
specserve plan --target meta-llama/Llama-3.3-70B-Instruct \
--draft meta-llama/Llama-3.2-1B-Instruct --gpus 4xH100 1xL4
specserve plan --stages 0.8:0.05 0.6,0.7:0.01
""",
    "heads": """
specserve heads --target meta-llama/Llama-3.1-8B --text corpus.txt --out heads
specserve heads --target path/to/target --text one.txt two.txt --out heads --heads 6 --minutes 30
""",
    "dflash": """
specserve dflash --target path/to/target --text one.txt two.txt --out dflash
specserve dflash --target path/to/target --text one.txt --out dspark --markov-rank 64 --minutes 600
""",
    "eagle": """
specserve eagle --target meta-llama/Llama-3.1-8B --text corpus.txt --out eagle --minutes 600
specserve eagle --target path/to/target --text one.txt two.txt --out eagle --draft-vocab 8192
""",
    "inflate": """
specserve inflate --model path/to/target --params 200M --out target-200M
specserve inflate --model path/to/target --params 1B --out target-1B
""",
    "quantize": """
specserve quantize --model path/to/target --to int8 --out target-int8
specserve quantize --model path/to/target --to int4 --out target-int4 --text corpus.txt
""",
    "keys": """
specserve keys create alice --file keys.txt --requests-per-minute 60 --tokens-per-minute 100000
specserve keys create bob --file keys.txt --concurrent-requests 8 --expires 2027-01-31
specserve keys create prometheus --file keys.txt --scopes metrics
specserve keys check --file keys.txt
""",
    "completion": """
specserve completion bash >> ~/.bashrc
specserve completion zsh > ~/.zfunc/_specserve
specserve completion fish > ~/.config/fish/completions/specserve.fish
""",
}
# Commands of which `specserve --help` shows an example.
FIRST = ("serve", "generate", "doctor", "bench", "plan")


def epilog(command: str) -> str:
    """Return the end of a command's --help."""
    return _section(EXAMPLES[command].strip().splitlines())


def overview() -> str:
    """Return one example of each of the commands in FIRST."""
    return _section([EXAMPLES[command].strip().splitlines()[0] for command in FIRST])


def _section(lines: list[str]) -> str:
    return "\n".join(["examples:", *(f"  {line}" for line in lines)])
