"""Workshop: rules for the weights on the embedded digits, standalone (torch, numpy). One line per variant and alpha.

usage: digits2.py FOLDER OUT WORKERS [variant ...]   (FOLDER holds digits.npz and h0_demo.safetensors)
The seed's 359 test digits are split: 120 to choose on ("val"), 239 to report ("test").
"""
import json, math, os, sys, time
os.environ["OMP_NUM_THREADS"] = "1"
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F
from safetensors.torch import load_file

torch.set_num_threads(1)
DIR = sys.argv[1] if len(sys.argv) > 1 else "."
Z = np.load(DIR + "/digits.npz"); H0 = load_file(DIR + "/h0_demo.safetensors")
X, Y, A = torch.from_numpy(Z["x"]).float() / 255, torch.from_numpy(Z["y"]), torch.from_numpy(Z["a"]).float() / 255
MULT = {.1: 30.75, .5: 6.9, 1.: 3.73}

class Net(nn.Module):
    def __init__(s):
        super().__init__(); L = []; c = 1
        for j, o in enumerate((16, 32, 32)): L += [nn.Conv2d(c, o, 3, 1 if j == 0 else 2, 1, bias=False), nn.GroupNorm(8, o), nn.ReLU()]; c = o
        s.features = nn.Sequential(*L, nn.Identity(), nn.Flatten()); s.head = nn.Linear(128, 10)
    def forward(s, x): return s.head(s.features(x))
def net():
    m = Net(); m.features.load_state_dict(H0); return m
def split(y, n, alpha, seed):
    rng = np.random.RandomState(seed); L = np.log(np.maximum(rng.dirichlet([alpha] * n, 10), 1e-300))
    for _ in range(300): L -= np.logaddexp.reduce(L, 0); L -= np.logaddexp.reduce(L, 1)[:, None]
    P = np.exp(L); out = [[] for _ in range(n)]
    for j in range(10):
        idx = np.argwhere(y == j).flatten()
        for i, q in enumerate(np.split(idx, np.round(np.cumsum(P[j])[:-1] * len(idx)).astype(int))): out[i].append(q)
    return [torch.from_numpy(np.concatenate(o)) for o in out]
def sinkhorn(P, prior, it=20):
    P = P.clamp_min(1e-8)
    for _ in range(it): P = P * (prior * len(P) / P.sum(0)); P = P / P.sum(1, keepdim=True)
    return P

def run(seed, succ=1, eps=.5, k=12, rounds=5, alpha=.01, n=10, C=1., bq=96, la=.3, eff=0., lr=3e-3, dlr=3e-4, align=0, keep=.5, fall=0, lam="rho", dist=1, noisy=1, lep=1, ramp=0., soft=0., slr=1.):
    """la: factor of log prior (floor 1e-3). eff > 0: adjustment eff * log((prior + lam * public share) / (1 + lam)), no floor.
    keep: anchor = keep * rho, fall=1: divided by the round. lam: "rho", "grow" (max(rho, r/(r+2))) or "1"."""
    torch.manual_seed(seed); pm = np.random.RandomState(seed).permutation(len(X)); te, tr = torch.from_numpy(pm[:359]), torch.from_numpy(pm[359:]); x, y, xt, yt = X[tr], Y[tr], X[te], Y[te]
    parts = [p for p in split(y.numpy(), n, alpha, seed) if len(p)]; N, D = A[:600], A[600:]; m = net().eval()
    with torch.no_grad(): fN, fD, fx, ft = map(m.features, (N, D, x, xt))
    mu = fN.mean(0); L, Q = torch.linalg.eigh(torch.cov(fN.T).double()); W = (Q / L.clamp_min(1e-9).sqrt()).flip(1)[:, :k].float(); c = ((fN - mu) @ W).norm(dim=1).median()
    def u(g): z = (g - mu) @ W / c; return z / z.norm(dim=1, keepdim=True).clamp_min(1)
    sig = MULT[eps] * math.sqrt(2); s0 = sig * math.sqrt(2); S = []
    for p in parts:
        a = torch.cat([u(fx[p]), torch.ones(len(p), 1)], 1) / math.sqrt(2); s = torch.zeros(10, k + 1).index_add_(0, y[p], a); S.append(s + noisy * sig * torch.randn(s.shape))
    S = torch.stack(S); cnt = S[:, :, -1] * math.sqrt(2); w = (cnt - 2 * s0).clamp_min(0); fb = w.sum(0) == 0; w[:, fb] = cnt[:, fb].clamp_min(1); den = (w * cnt).sum(0).clamp_min(1e-6)
    mean = torch.einsum("ic,ick->ck", w, S[:, :, :-1]) * math.sqrt(2) / den[:, None]; var = s0**2 * (w**2).sum(0) / den**2; e = mean - mean.mean(0)
    s2 = (e.square() - var[:, None]).mean(0).clamp_min(0); e = e * (s2 / (s2 + var[:, None]).clamp_min(1e-12))
    f0 = lambda uu: c**2 * ((uu - mean.mean(0)) @ e.T - .5 * e.square().sum(1)); share = w / w.sum(0).clamp_min(1e-9)
    acc = lambda z: [100 * (z.argmax(1) == yt)[s].float().mean().item() for s in (slice(0, 120), slice(120, None))]
    rho = float((s2.sum() / (s2.sum() + var.mean() * k)).clamp(0, 1)); T = f0(u(fD)); G = torch.cat([fD, torch.ones(len(fD), 1)], 1)
    if succ:
        sol = torch.linalg.solve(G.T @ G + 1e-3 * len(G) * torch.eye(129), G.T @ T)
        with torch.no_grad(): m.head.weight.copy_(sol[:-1].T); m.head.bias.copy_(sol[-1])
    state = {a: b.clone() for a, b in m.state_dict().items()}; prior = (w.sum(0) / w.sum()).clamp_min(.02); prior = prior / prior.sum()
    Q0 = F.softmax(T, 1); Q0 = sinkhorn(Q0, prior) if align else Q0; Qs = Q0; bank = {}; hist = []; rng = np.random.RandomState(seed)
    for r in range(rounds):
        lm = {"rho": rho, "grow": max(rho, r / (r + 2.)), "1": 1.}[lam]; kp = keep * rho / ((r + 1) if fall else 1); qbar = Qs.mean(0)
        sel = rng.choice(len(parts), max(1, int(C * len(parts))), replace=False); new = []
        for i in sel:
            m = net(); m.load_state_dict(state); m.train(); o = torch.optim.Adam(m.parameters(), lr=lr); p = parts[i]; pr = torch.bincount(y[p], minlength=10) / len(p)
            adj = 0. if not succ else eff * torch.log((pr + lm * qbar + 1e-3) / (1 + lm)) if eff else la * torch.log(pr.clamp_min(1e-3))
            tg = F.one_hot(y, 10).float()
            if soft: tg[p] = (1 - soft) * tg[p] + soft * F.softmax(m(x[p]).detach() + adj, 1)
            for t, b in enumerate([b for _ in range(lep) for b in p[torch.randperm(len(p))].split(32)]):
                xb = x[b]
                if succ: j = torch.randint(len(D), (bq,)); xb = torch.cat([xb, D[j]])
                out = m(xb); loss = F.cross_entropy(out[:len(b)] + (min(1., ramp * lr * (t + 1)) * adj if ramp else adj), tg[b])
                if succ: loss = loss + lm * F.kl_div(F.log_softmax(out[len(b):], 1), Qs[j], reduction="batchmean")
                o.zero_grad(); loss.backward(); o.step()
            new.append({a: v.clone() for a, v in m.state_dict().items()})
            with torch.no_grad(): bank[i] = F.softmax(m(D), 1)
        wt = torch.tensor([len(parts[i]) for i in sel]).float(); wt /= wt.sum(); old = state; state = {a: sum(v * s[a] for v, s in zip(wt, new)) for a in new[0]}
        state = {a: old[a] + slr * (v - old[a]) for a, v in state.items()}; m = net(); m.load_state_dict(state)
        if succ and dist:
            ids = list(bank); ww = share[ids] @ Qs.T + 1e-6; ww = ww / ww.sum(0); tgt = sum(ww[v][:, None] * bank[i] for v, i in enumerate(ids)); tgt = sinkhorn(tgt, prior) if align else tgt; tgt = (1 - kp) * tgt + kp * Q0
            m.train(); o = torch.optim.Adam(m.parameters(), lr=dlr)
            for b in torch.randperm(len(D)).split(128): o.zero_grad(); F.kl_div(F.log_softmax(m(D[b]), 1), tgt[b], reduction="batchmean").backward(); o.step()
            state = {a: v.clone() for a, v in m.state_dict().items()}
        with torch.no_grad(): hist.append(acc(m(xt))); Qs = F.softmax(m(D), 1); Qs = sinkhorn(Qs, prior) if align else Qs; Qs = (1 - kp) * Qs + kp * Q0
    return dict(rho=round(rho, 3), val=hist[-1][0], test=hist[-1][1], every=[round(h[0], 1) for h in hist])

VARIANTS = {
    **{f"soft{u}_la{l}": dict(soft=u, la=l) for u in (.4, .7) for l in (0., .3, 1.)}, **{f"lep6_soft{u}_la{l}": dict(soft=u, la=l, lep=6) for u in (.4, .7) for l in (0., .3, 1.)}, **{f"slr{v}_la{l}": dict(slr=v, la=l) for v in (1.5, 2.) for l in (0., 1.)},
    "lep6_la0_fall": dict(lep=6, la=0., fall=1), "lep6_la1_fall": dict(lep=6, la=1., fall=1), "la0_fall_15": dict(la=0., fall=1, rounds=15), "la0.3_fall_15": dict(fall=1, rounds=15), "la0_fall": dict(la=0., fall=1),
    **{f"lep{e}_la{l}": dict(lep=e, la=l) for e in (6,) for l in (0., .3, 1.)}, **{f"ramp{r}": dict(la=1., ramp=float(r)) for r in (10, 20, 40)}, **{f"lep6_ramp{r}": dict(la=1., ramp=float(r), lep=6) for r in (10, 20, 40)},
    "la0_15": dict(la=0., rounds=15), "ramp20_15": dict(la=1., ramp=20., rounds=15), "la0_grow": dict(la=0., lam="grow"), "ramp20_nodist": dict(la=1., ramp=20., dist=0), "ramp20_dlr1e-4": dict(la=1., ramp=20., dlr=1e-4), "la0_nokeep": dict(la=0., keep=0.), "lep6_la1_nokeep": dict(la=1., keep=0., lep=6), "lep6_la1_lam1": dict(la=1., lam="1", lep=6), "lep6_la1_lam1_nokeep": dict(la=1., lam="1", keep=0., lep=6), "lep6_fedavg": dict(succ=0, lep=6),
    "fedavg": dict(succ=0), "fedavg15": dict(succ=0, rounds=15),
    "rule_la1": dict(la=1.), "rule_la0.5": dict(la=.5), "rule_la0.3": dict(la=.3), "rule_la0.15": dict(la=.15), "rule_la0": dict(la=0.),
    "eff1": dict(eff=1.), "eff1.5": dict(eff=1.5), "eff2": dict(eff=2.), "eff0.5": dict(eff=.5),
    "eff1_grow": dict(eff=1., lam="grow"), "eff1_lam1": dict(eff=1., lam="1"), "eff1_fall": dict(eff=1., fall=1), "eff1_grow_fall": dict(eff=1., lam="grow", fall=1),
    "eff1_sink": dict(eff=1., align=1), "eff1_sink_fall_grow": dict(eff=1., align=1, lam="grow", fall=1), "eff1_nokeep": dict(eff=1., keep=0.), "eff1_keep1": dict(eff=1., keep=1.),
    "la0.3_grow": dict(lam="grow"), "la0.3_fall": dict(fall=1), "la0.3_sink": dict(align=1), "eff1_nodist": dict(eff=1., dist=0), "eff1_dlr1e-4": dict(eff=1., dlr=1e-4),
    "rule_la0.3_15": dict(rounds=15), "eff1_15": dict(eff=1., rounds=15), "eff1_grow_15": dict(eff=1., lam="grow", rounds=15), "eff1_fall_15": dict(eff=1., fall=1, rounds=15), "eff1_fall_grow_15": dict(eff=1., fall=1, lam="grow", rounds=15),
    "eff1_sink_15": dict(eff=1., align=1, rounds=15), "la1_15": dict(la=1., rounds=15),
    "eff1_C0.4_10": dict(eff=1., C=.4, rounds=10), "la0.3_C0.4_10": dict(C=.4, rounds=10), "eff1_eps0.1": dict(eff=1., eps=.1, k=8), "la0.3_eps0.1": dict(eps=.1, k=8), "eff1_eps1": dict(eff=1., eps=1., k=24), "la0.3_eps1": dict(eps=1., k=24),
    "eff1_grow_C0.4_10": dict(eff=1., C=.4, rounds=10, lam="grow"), "eff1_grow_eps0.1": dict(eff=1., eps=.1, k=8, lam="grow"),
}
def job(t):
    name, al, s = t; return name, al, s, run(s, alpha=al, **VARIANTS[name])
if __name__ == "__main__":
    import multiprocessing as mp
    names = sys.argv[4:] or list(VARIANTS); seeds = (0, 1, 2); jobs = [(v, al, s) for v in names for al in ((.01, 100.) if "lep" in v else (.01, .1, 1., 100.)) for s in seeds]; got = {}; t0 = time.time()
    with mp.Pool(int(sys.argv[3])) as pool, open(sys.argv[2], "w") as f:
        for v, al, s, r in pool.imap(job, jobs):
            got.setdefault((v, al), []).append(r)
            if len(got[v, al]) == len(seeds):
                g = got[v, al]; f.write(json.dumps(dict(v=v, alpha=al, rho=round(np.mean([q["rho"] for q in g]), 2), val=round(np.mean([q["val"] for q in g]), 1), test=round(np.mean([q["test"] for q in g]), 1), per_seed=[round(q["test"], 1) for q in g], t=round(time.time() - t0))) + "\n"); f.flush()
