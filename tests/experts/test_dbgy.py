import torch, hf_training
from test_expert_training import train_in
from harness import run_ranks
def test_x(tmp_path):
    (found, *_) = run_ranks(train_in, 2, "trl-sft", tmp_path / "shared", hf_training.stage(1), timeout=240)
    wanted = train_in("trl-sft", tmp_path / "plain", None)
    print(found[0], wanted[0])
    for n in wanted[1]: print(n, float((found[1][n]-wanted[1][n]).abs().max()))
