# An engineer with a ds_config.json, a DeepSpeed script and two Slurm nodes.
# expect: gradient_clipping is not in the file; DeepSpeed's default 1.0 is used (0 switches it off)
# expect: optimizer.params.weight_decay is not in the file; DeepSpeed's default 0.0 is used
# expect: started at step 0
# expect: started at step 4
# expect: trained to step 8
# expect: clips at 1.0
# expect: batch file: fine
# expect: global_step8

cat > ds_config.json <<'END'
{
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2,
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2, "overlap_comm": true, "reduce_bucket_size": 5e8},
  "comms_logger": {"enabled": false},
  "my_note": "tuned in March"
}
END

cat > train.py <<'END'
import argparse
import os

import deepspeed
import torch

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
inputs = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
engine, optimizer, loader, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=data
)
if os.path.isdir("checkpoints"):
    engine.load_checkpoint("checkpoints")
first = engine.global_rank == 0
if first:
    print("started at step", engine.global_steps, "and clips at", engine.gradient_clipping(), flush=True)
batches = iter(deepspeed.utils.RepeatingLoader(loader))
while engine.global_steps < args.steps:
    x, y = (part.to(engine.device) for part in next(batches))
    loss = torch.nn.functional.mse_loss(engine(x.to(torch.bfloat16)).float(), y)
    engine.backward(loss)
    engine.step()
engine.save_checkpoint("checkpoints")
if first:
    print("trained to step", engine.global_steps, "loss", round(float(loss), 3), flush=True)
END

zeromesh config ds_config.json > /dev/null && echo "no error for my_note" && exit 1
zeromesh config ds_config.json --fix > fixed.json
zeromesh config fixed.json > resolved.json
grep -q '"gradient_clipping": 1.0' resolved.json

zeromesh launch --as-deepspeed --nproc 2 train.py --deepspeed_config ds_config.json
zeromesh launch --as-deepspeed --nproc 2 train.py --deepspeed_config ds_config.json --steps 8

zeromesh inspect checkpoints

sed 's/zeromesh train "$@" --auto-resume/zeromesh launch --as-deepspeed train.py --deepspeed_config ds_config.json/' \
    "$CLONE/examples/slurm/train.sbatch" > train.sbatch
grep -q as-deepspeed train.sbatch
bash -n train.sbatch && echo "batch file: fine"
