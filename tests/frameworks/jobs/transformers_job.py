"""Hugging Face's Trainer trains a language model whose embeddings have sparse gradients, and clips these."""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import zenps as zps
from tests.frameworks.recommender import BATCH, EPOCHS, EXAMPLES, save
from zenps.transformers import Callback

zps.init()
torch.manual_seed(3)
sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=False))
model.model.embed_tokens.sparse = True
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (EXAMPLES, 6))]
arguments = TrainingArguments(
    sys.argv[1], use_cpu=True, per_device_train_batch_size=BATCH // zps.size(), num_train_epochs=EPOCHS,
    max_grad_norm=0.5, logging_steps=1, report_to="none",
)  # fmt: skip
sgd = torch.optim.SGD(model.parameters(), 0.2)
trainer = Trainer(model, arguments, train_dataset=data, optimizers=(sgd, None))
trainer.add_callback(Callback(trainer))
for _ in range(2):  # the second training has the wrapper of the first
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
save(model.state_dict(), losses, trainer.is_world_process_zero())
zps.shutdown()
