"""Pretrain through a shared store, and print what came of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from helpers.shared_pretraining import pretrain

torch.set_num_threads(1)
print(json.dumps(pretrain(Path(sys.argv[1]))))
