# A vision person with a training loop of their own: one process, two, the sampler that was forgotten, evaluation, a
# checkpoint, and going on from it.
#
# expect: 1 process: test accuracy 100.0 %
# expect: ranks 0-1 train on the same samples
# expect: DistributedSampler(dataset, num_replicas=engine.data_size, rank=engine.data_rank)
# expect: 2 processes: test accuracy 100.0 %
# expect: goes on after update 24
# expect: ended after update 48

cat > images.py <<'PY'
import torch
from torch.utils.data import TensorDataset


def images(count, seed):
    """Return noisy grey images, 16x16, and the quadrant that is bright in each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=generator)
    pixels = torch.randn(count, 1, 16, 16, generator=generator) / 4
    for image, label in zip(pixels, labels.tolist()):
        row, column = divmod(label, 2)
        image[0, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 1
    return TensorDataset(pixels, labels)
PY

cat > train.py <<'PY'
import sys

import torch
import zeromesh
from images import images
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 4)
)
config = {"train_batch_size": 32, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 3}}
engine, *_ = zeromesh.initialize(model=model, config=config)
dataset = images(768, seed=0)
sampler = None  # SAMPLER
loader = DataLoader(dataset, batch_size=32 // engine.data_size, sampler=sampler)
if "resume" in sys.argv:
    engine.load_checkpoint("checkpoints")
    print(f"goes on after update {engine.global_steps}")
for pixels, labels in loader:
    loss = cross_entropy(engine(pixels), labels)
    engine.backward(loss)
    engine.step()
engine.save_checkpoint("checkpoints")

engine.eval()
right = total = 0
with torch.no_grad():
    for pixels, labels in DataLoader(images(128, seed=1), batch_size=32):
        right += int((engine(pixels).argmax(1) == labels).sum())
        total += len(labels)
if engine.mesh.rank == 0:
    count = engine.mesh.world_size
    print(f"{count} process{'es' * (count > 1)}: test accuracy {100 * right / total:.1f} %")
    print(f"ended after update {engine.global_steps}")
PY

python train.py
zeromesh launch --nproc 2 train.py # each rank goes through all images
rm -r checkpoints
sed -i 's/sampler = None  # SAMPLER/sampler = DistributedSampler(dataset, num_replicas=engine.data_size, rank=engine.data_rank)/
s/import DataLoader/import DataLoader, DistributedSampler/' train.py
zeromesh launch --nproc 2 train.py > sampled.txt 2>&1
! grep "same samples" sampled.txt
cat sampled.txt
zeromesh launch --nproc 2 train.py resume
