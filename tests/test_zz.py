import torch, zeromesh, traceback
from torch import nn
from harness import run_ranks


class ED(nn.Module):
    def __init__(s):
        super().__init__()
        s.enc = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        s.dec = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
        s.logit_scale = nn.Parameter(torch.ones(()))

    def forward(s, x):
        return s.dec(s.enc(x))


class RetP(ED):
    def forward(s, x):
        return s.dec(s.enc(x)), s.logit_scale


def start(row, cls=ED):
    torch.manual_seed(0)
    m = cls().double()
    return m, zeromesh.initialize(
        model=m,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": row},
            "slots": {"parameter": 2, "gradient": 2},
        },
    )[0]


def attempt(name, out, f):
    try:
        out[name] = str(f())[:200]
    except BaseException as e:
        out[name] = (
            type(e).__name__ + ": " + str(e)[:300] + " @ " + "".join(traceback.format_tb(e.__traceback__)[-1:])[:300]
        )


def f(row):
    out = {}
    x = torch.randn(2, 6, dtype=torch.float64)
    m, e = start(row)

    def freeze():
        l = e(x).square().mean()
        m.enc[0].weight.requires_grad_(False)
        e.backward(l)
        e.step()
        m.enc[0].weight.requires_grad_(True)
        l = e(x).square().mean()
        e.backward(l)
        e.step()

    attempt("freeze", out, freeze)
    for n, g in {
        "to": lambda: m.to("cpu"),
        "cpu": lambda: m.cpu(),
        "double": lambda: m.double(),
        "to dtype": lambda: m.to(torch.float64),
        "float": lambda: m.float(),
        "engine.to": lambda: e.to("cpu"),
        "enc.cpu": lambda: m.enc.cpu(),
    }.items():
        m, e = start(row)
        attempt(n, out, g)
        attempt(n + " then train", out, lambda: (e.backward(e(x).square().mean()), e.step()))
    m, e = start(row)
    attempt(
        "autograd.grad",
        out,
        lambda: [
            t.sum().item()
            for t in torch.autograd.grad(e(x).square().mean(), list(m.parameters()), allow_unused=True)
            if t is not None
        ],
    )
    attempt("after", out, lambda: (e.backward(e(x).square().mean()), e.step()))
    attempt("dec(enc)", out, lambda: (e.backward(e.dec(e.enc(x)).square().mean()), e.step()))
    attempt("after", out, lambda: (e.backward(e(x).square().mean()), e.step()))
    attempt("model.forward", out, lambda: (e.backward(m.forward(x).square().mean()), e.step()))
    attempt("after", out, lambda: (e.backward(e(x).square().mean()), e.step()))
    m, e = start(row, RetP)

    def ret():
        for _ in range(3):
            y, s = e(x)
            e.backward((y * s).square().mean())
            e.step()
        return "ok"

    attempt("returns parameter", out, ret)
    return out


def test_it():
    for row in (0, 2, 3):
        print("ROW", row)
        for k, v in run_ranks(f, 2, row)[0].items():
            print("  ", k, "->", v)
