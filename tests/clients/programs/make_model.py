"""Make a small model for these programs: its weights are random, its tokens are those of Python's library.

python -m tests.clients.programs.make_model DIRECTORY
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for message in messages %}{{ message.role }}: "
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n"
    "</tool_call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
VOCAB, CONTEXT = 8192, 1 << 17

directory = Path(sys.argv[1])
with TemporaryDirectory() as made:
    train = [sys.executable, "-m", "p2ptrain", "tokenizer", "train", "--data", "stdlib", "--out", f"{made}/tokenizer"]
    subprocess.run([*train, "--vocab", str(VOCAB)], check=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(f"{made}/tokenizer")
tokenizer.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=False)
tokenizer.chat_template = TEMPLATE
tokenizer.save_pretrained(directory)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
sizes |= {"num_key_value_heads": 1, "vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT}
config = LlamaConfig(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, **sizes)
model = LlamaForCausalLM(config)
with torch.no_grad():  # texts end soon: behind every fifth token
    ends = [token for token in range(0, len(tokenizer), 5) if not tokenizer.decode([token]).endswith(":")]
    model.get_input_embeddings().weight[ends, 0] = 1.0
    model.get_output_embeddings().weight[tokenizer.eos_token_id, 0] = 3.0
model.save_pretrained(directory)
