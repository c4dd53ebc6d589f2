# A person with a Keras model, and one with a Horovod script, each on two ranks; then the page of a run.

# The Keras model by itself, and the same on two ranks.
python "$CLONE/examples/keras_fit/train.py" --alone --epochs 1
zeromesh launch --nproc 2 "$CLONE/examples/keras_fit/train.py" --epochs 1 2>&1 | tee keras.txt
# expect: test loss
# expect: settings you changed: zero_optimization.stage = 3
# The batches are those of fit, 64: the log must not speak of another size.
if grep -q "train_batch_size" keras.txt; then exit 1; fi

# A script for Horovod: one import is changed.
cat > train_hvd.py <<'SCRIPT'
import torch
import horovod.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range(20):
    inputs = torch.randn(8, 4)
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
loss = hvd.allreduce(loss.detach(), name="loss").item()
if hvd.rank() == 0:
    print(f"Horovod script: trained on {hvd.size()} ranks, the loss is a number: {loss == loss}")
SCRIPT
sed -i 's/import horovod.torch as hvd/import zeromesh.horovod as hvd/' train_hvd.py
zeromesh launch -np 2 train_hvd.py
# expect: Horovod script: trained on 2 ranks, the loss is a number: True

# A run of the trainer, and its page.
python -c 'print("the model reads words and learns them. " * 400)' > text.txt
cat > run.json <<'JSON'
{
  "train_batch_size": 4,
  "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
  "model": {"hidden_size": 32, "layers": 2, "heads": 2, "sequence_length": 32},
  "data": {"train": "text.txt"},
  "run": {"steps": 20, "log_every": 5, "output": "out", "sample": {"prompts": ["the"], "length": 10}}
}
JSON
zeromesh train run.json > run.txt
test "$(sed -n '/^model  /,$p' run.txt | wc -l)" -le 25
zeromesh report out
# expect: wrote out/report.html
grep -q "## Samples" out/report.md
grep -q "prefers-color-scheme: dark" out/report.html
if grep -q "://" out/report.html; then exit 1; fi
zeromesh report out --watch
# expect: the run has ended; the page is complete
