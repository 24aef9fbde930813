"""Workshop: the successor of FedAUX on CIFAR-10, second lab. One process runs a list of jobs one after another.

usage: lab.py FOLDER LOG JOB [JOB ...]     a JOB is "name=...,C=0.4,alpha=0.01,..." (the defaults are in DEFAULTS)

2,000 training images, drawn with a fixed seed, belong to no client: settings are chosen on them ("val"). The test images are
looked at only by jobs with test=1. A whole training step is one CUDA graph: it gathers, crops, mirrors and normalises by itself.
"""
import json, math, sys, time
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F

dev = "cuda" if torch.cuda.is_available() else "cpu"; CUDA = dev == "cuda"
torch.backends.cudnn.benchmark = True; torch.backends.cuda.matmul.allow_tf32 = True
MEAN = torch.tensor([0.4914, 0.4822, 0.4465], device=dev).view(1, 3, 1, 1); STD = torch.tensor([0.2023, 0.1994, 0.2010], device=dev).view(1, 3, 1, 1)
MULT = {0.1: 30.7496, 1.0: 3.73, 0.0: 0.0}  # noise multiplier of the analytic Gaussian mechanism at delta = 1e-5
PAD = 4

class Block(nn.Module):
    def __init__(s, i, o, st):
        super().__init__(); s.conv1 = nn.Conv2d(i, o, 3, st, 1, bias=False); s.bn1 = nn.BatchNorm2d(o); s.conv2 = nn.Conv2d(o, o, 3, 1, 1, bias=False); s.bn2 = nn.BatchNorm2d(o)
        s.downsample = nn.Sequential(nn.Conv2d(i, o, 1, st, bias=False), nn.BatchNorm2d(o)) if st != 1 or i != o else None
    def forward(s, x):
        y = s.bn2(s.conv2(F.relu(s.bn1(s.conv1(x)), inplace=True))); return F.relu(y + (x if s.downsample is None else s.downsample(x)))
class Net(nn.Module):
    def __init__(s):
        super().__init__(); s.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False); s.bn1 = nn.BatchNorm2d(64); w = [64, 64, 128, 256, 512]
        for k in range(1, 5): setattr(s, f"layer{k}", nn.Sequential(Block(w[k-1], w[k], 1 if k == 1 else 2)))
        s.fc = nn.Linear(512, 10)
    def feats(s, x): return s.layer4(s.layer3(s.layer2(s.layer1(F.relu(s.bn1(s.conv1(x)), inplace=True))))).mean((2, 3))
    def forward(s, x): return s.fc(s.feats(x))
def net(): return Net().to(dev, memory_format=torch.channels_last)
def norm(x): return ((x.permute(0, 3, 1, 2).float() / 255 - MEAN) / STD).contiguous(memory_format=torch.channels_last)
def pad(x): return F.pad(x.permute(0, 3, 1, 2).half(), [PAD] * 4, mode="reflect").permute(0, 2, 3, 1).byte().contiguous()
def padded(x): return torch.cat([pad(x[i:i+5000]) for i in range(0, len(x), 5000)])
GRID = torch.arange(32, device=dev)
def take(P, idx, aug):
    """P [N, 40, 40, 3] bytes, idx [B], aug [B, 3] = (row, column, mirrored) -> normalised [B, 3, 32, 32]"""
    col = torch.where(aug[:, 2:] > 0, 31 - GRID, GRID) + aug[:, 1:2]; row = GRID + aug[:, :1]; W = 32 + 2 * PAD
    pix = ((idx[:, None] * W + row)[:, :, None] * W + col[:, None, :]).view(-1)
    return norm(P.view(-1, 3).index_select(0, pix).view(-1, 32, 32, 3))
def draw_aug(n, kind, gen):
    """kind 0: none, 1: crops and flips, 2: flips"""
    a = torch.full((n, 3), PAD, device=dev); a[:, 2] = 0
    if kind == 1: a[:, :2] = torch.randint(0, 2 * PAD + 1, (n, 2), device=dev, generator=gen)
    if kind: a[:, 2] = torch.randint(0, 2, (n,), device=dev, generator=gen)
    return a
def split(y, n, alpha, seed):
    rng = np.random.RandomState(seed); c = y.max() + 1; L = np.log(np.maximum(rng.dirichlet([alpha] * n, c), 1e-300))
    for _ in range(300): L -= np.logaddexp.reduce(L, 0); L -= np.logaddexp.reduce(L, 1)[:, None]
    P = np.exp(L); out = [[] for _ in range(n)]
    for j in range(c):
        idx = np.argwhere(y == j).flatten()
        for i, part in enumerate(np.split(idx, np.round(np.cumsum(P[j])[:-1] * len(idx)).astype(int))): out[i].append(part)
    return [np.concatenate(o) for o in out]
@torch.no_grad()
def fwd(f, x, bs=4000, mirror=False):
    """x bytes [N, 32, 32, 3]; mirror: mean of the image's and its mirror image's outputs"""
    with torch.autocast(dev, torch.bfloat16, enabled=CUDA):
        return torch.cat([(f(norm(x[i:i+bs])).float() + f(norm(x[i:i+bs].flip(2))).float()) / 2 if mirror else f(norm(x[i:i+bs])).float() for i in range(0, len(x), bs)])

# ---- the public map, the release, the private head
def public_map(fN, k, power):
    """Whitening with a chosen power of the spectrum (0.5: whitening, less: leading directions keep a larger part of the norm)."""
    mu = fN.mean(0); L, Q = torch.linalg.eigh(torch.cov(fN.T.double())); L, Q = L.flip(0)[:k].clamp_min(1e-12), Q.flip(1)[:, :k]
    s = L.pow(-power); W = (Q * s).float(); c = ((fN - mu) @ W).norm(dim=1).median()
    def u(f): z = (f - mu) @ W / c; return z / z.norm(dim=1, keepdim=True).clamp_min(1)
    return u, (L * s.square() / c.double()**2)  # the map, variance of each coordinate on public data
def class_sums(u, y):
    a = torch.cat([u, torch.ones(len(u), 1, device=u.device)], 1) / math.sqrt(2); S = torch.zeros(10, a.shape[1], device=u.device, dtype=torch.double); return S.index_add_(0, y, a.double())
def posterior(S, sig, est="lab"):
    """S [n, C, k+1] noisy sums -> centre [k], shrunk class means less the centre [C, k], counts [n, C], rho"""
    cnt = S[:, :, -1] * math.sqrt(2); s0 = sig * math.sqrt(2); w = (cnt - 2 * s0).clamp_min(0); fb = w.sum(0) == 0; w[:, fb] = cnt[:, fb].clamp_min(1)
    v = (w > 0).double() if est == "pool" else w  # pool: sums added up, each client counted in or out
    den = (v * cnt).sum(0).clamp_min(1e-9); mean = torch.einsum("ic,ick->ck", v, S[:, :, :-1]) * math.sqrt(2) / den[:, None]; var = (s0 ** 2) * (v ** 2).sum(0) / den ** 2
    pri = w.sum(0) / w.sum(); g = (pri[:, None] * mean).sum(0); e = mean - g; s2 = (e.square() - var[:, None]).mean(0).clamp_min(0); rho = float(s2.sum() / (s2.sum() + var.mean() * e.shape[1]).clamp_min(1e-12))
    if sig > 0: e = e * (s2 / (s2 + var[:, None]).clamp_min(1e-12))
    return g, e, w, rho
def lda(g, e, v, ridge=0.):
    """Linear discriminant with the public variance v of each coordinate as the common variance."""
    return lambda u: (((u.double() - g) / v) @ e.T - .5 * (e.square() / v).sum(1)).float()
def sinkhorn(P, prior, it=20):
    P = P.clamp_min(1e-8)
    for _ in range(it): P = P * (prior * len(P) / P.sum(0)); P = P / P.sum(1, keepdim=True)
    return P

# ---- training
class Steps:
    """bp private examples (cross-entropy of logits + adj) and bq public ones (lam * KL to soft labels), one Adam step."""
    def __init__(s, lr, bp, bq, steps, X, P, D, Q):
        s.m = net(); s.m.train(); s.bp, s.bq, s.X, s.P, s.D, s.Q = bp, bq, X, P, D, Q
        s.opt = torch.optim.Adam(s.m.parameters(), lr=torch.tensor(lr, device=dev) if CUDA else lr, capturable=CUDA, fused=CUDA)
        s.ip = torch.zeros(steps, max(bp, 1), dtype=torch.long, device=dev); s.iq = torch.zeros(steps, max(bq, 1), dtype=torch.long, device=dev); s.aug = draw_aug(steps * (bp + bq), 0, None).view(steps, bp + bq, 3)
        s.t = torch.zeros(1, dtype=torch.long, device=dev); s.adj = torch.zeros(10, device=dev); s.lam = torch.ones((), device=dev); s.ramp = torch.ones((), device=dev); s.stream = torch.cuda.Stream() if CUDA else None
        if CUDA:
            s.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(s.stream):
                for _ in range(3): s.step()
            torch.cuda.synchronize(); s.g = torch.cuda.CUDAGraph(); s.opt.zero_grad(set_to_none=True)
            with torch.cuda.graph(s.g, stream=s.stream): s.step()
            s.run = s.g.replay
        else: s.step(); s.run = s.step
    def step(s):
        aug = s.aug.index_select(0, s.t)[0]; xs = []
        if s.bp: ip = s.ip.index_select(0, s.t)[0]; xs.append(take(s.X, ip, aug[:s.bp]))
        if s.bq: iq = s.iq.index_select(0, s.t)[0]; xs.append(take(s.D, iq, aug[s.bp:]))
        x = torch.cat(xs).contiguous(memory_format=torch.channels_last) if len(xs) > 1 else xs[0]
        with torch.autocast(dev, torch.bfloat16, cache_enabled=False, enabled=CUDA): o = s.m(x)
        o = o.float(); loss = 0.
        if s.bp: loss = loss + F.cross_entropy(o[:s.bp] + s.adj * (s.ramp * (s.t + 1)).clamp_max(1), s.P.index_select(0, ip))
        if s.bq: loss = loss + s.lam * F.kl_div(F.log_softmax(o[s.bp:], 1), s.Q.index_select(0, iq), reduction="batchmean")
        s.opt.zero_grad(set_to_none=True); loss.backward(); s.opt.step(); s.t += 1
    def start(s, sd, lr, reset=True):
        with torch.no_grad():
            for k, v in s.m.state_dict().items(): v.copy_(sd[k])
        for p in s.m.parameters():
            for t in s.opt.state[p].values():
                if reset: t.zero_()
        s.t.zero_()
        for gr in s.opt.param_groups:
            if CUDA: gr["lr"].fill_(lr)
            else: gr["lr"] = lr
    def save(s): return {k: v.clone() for k, v in s.m.state_dict().items()}

DEFAULTS = dict(name="", n=20, C=.4, alpha=.01, rounds=20, seed=0, k=64, eps=.1, power=.5, mir=0, est="lab", nd=20000, nr=20000, bp=32, bq=96, la=1., eff=0., lam="1", keep=0., fall=0, sink=0, aug=0, daug=0,
                llr=1e-3, lfall=1., dlr=5e-5, dfall=1., depochs=1, ema=.8, rel2=0, k2=32, mix2=.5, test=0, diag=1, G=2, lep=1, every=5, warm=0, ramp=0., mu=0., slr=1.)

def run(a, d, log):
    torch.manual_seed(a.seed); gen = torch.Generator(device=dev).manual_seed(77 + a.seed); t_start = time.time()
    X, Y, XP, V, Yv, Xt, Yt, aux, auxP, h0 = (d[k] for k in ("x", "y", "xp", "v", "yv", "xt", "yt", "aux", "auxp", "h0"))
    E, Ye = (torch.cat([V, Xt]), torch.cat([Yv, Yt])) if a.test else (V, Yv); nv = len(V)
    def acc(p): h = (p.argmax(1) == Ye).float(); return [round(100 * h[:nv].mean().item(), 2)] + ([round(100 * h[nv:].mean().item(), 2)] if a.test else [])
    parts = [torch.from_numpy(p).to(dev) for p in split(Y.cpu().numpy(), a.n, a.alpha, a.seed)]
    perm = torch.randperm(len(aux), generator=torch.Generator().manual_seed(a.seed)).to(dev); cut = int(.8 * len(aux)); iD, iN = perm[:cut][:max(a.nd, a.nr)], perm[cut:]; nd, nr = min(a.nd, len(iD)), len(iD)
    D, DP, NN = aux[iD], auxP[iD], aux[iN]; m = net(); m.load_state_dict(h0, strict=False); m.eval()
    mult = MULT[a.eps] * (math.sqrt(2) if a.rel2 else 1.); sig = mult * math.sqrt(2)
    def release(f, k, power, seed):
        """features of (private, negatives, distillation, evaluation) images -> head's outputs on D and E, counts, rho"""
        fx, fN, fD, fE = f; u, v = public_map(fN, k, power); ux = u(fx); S = torch.stack([class_sums(ux[p], Y[p]) for p in parts]); S = S + sig * torch.randn(S.shape, device=dev, dtype=S.dtype, generator=torch.Generator(device=dev).manual_seed(seed))
        g, e, cnt, rho = posterior(S, sig, a.est); h = lda(g, e, v); return h(u(fD)), h(u(fE)), cnt, rho
    feats = lambda z: fwd(m.feats, z, mirror=bool(a.mir))
    fD = fwd(m.feats, D); T0, T0e, cnt, rho = release((feats(X), feats(NN), feats(D), feats(E)), a.k, a.power, 1000 + a.seed); share = (cnt / cnt.sum(0).clamp_min(1e-9)).float(); prior = (cnt.sum(0) / cnt.sum()).float().clamp_min(.02); prior = prior / prior.sum()
    Q0 = F.softmax(T0, 1); Q0 = sinkhorn(Q0, prior) if a.sink else Q0; out = dict(head=acc(T0e), rho=round(rho, 3))
    def fit_head(T, f):
        G = torch.cat([f, torch.ones(len(f), 1, device=dev)], 1).double(); sol = torch.linalg.solve(G.T @ G + 1e-3 * len(G) * torch.eye(513, device=dev).double(), G.T @ T.double()).float()
        with torch.no_grad(): m.fc.weight.copy_(sol[:-1].T); m.fc.bias.copy_(sol[-1])
    fit_head(T0, fD); out["start"] = acc(fwd(m, E)); print(a.name, out, flush=True)
    Q, T = Q0.clone(), Q0[:nd].clone(); longest = max(len(p) for p in parts) // a.bp * a.lep
    hot = F.one_hot(Y, 10).float(); P = hot.clone(); loc = [Steps(a.llr, a.bp, a.bq, longest, XP, P, DP, Q) for _ in range(a.G)]; dis = Steps(a.dlr, 0, 128, nd // 128 * a.depochs, None, None, DP, T); state = {k: v.clone() for k, v in m.state_dict().items()}
    def distil(state, lr):
        dis.start(state, lr); n = nd // 128
        for ep in range(a.depochs): dis.iq[ep*n:(ep+1)*n] = torch.randperm(nd, device=dev, generator=gen)[:n*128].view(n, 128)
        dis.aug.copy_(draw_aug(dis.aug.shape[0] * 128, a.daug, gen).view_as(dis.aug))
        if CUDA: dis.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(dis.stream) if CUDA else nullctx():
            for _ in range(n * a.depochs): dis.run()
        if CUDA: torch.cuda.current_stream().wait_stream(dis.stream)
        return dis.save()
    def pred(sd, z): m.load_state_dict(sd); m.eval(); return F.softmax(fwd(m, z), 1)
    if a.warm: state = distil(state, a.dlr); out["warm"] = acc(pred(state, E))
    Qe = F.softmax(T0e, 1); bank, rng, hist, ema, tt = {}, np.random.RandomState(a.seed), [], None, time.time()
    for r in range(a.rounds):
        frac = r / max(a.rounds - 1, 1); cosine = lambda lo: lo + (1 - lo) * .5 * (1 + math.cos(math.pi * frac)); llr, dlr = a.llr * cosine(a.lfall), a.dlr * cosine(a.dfall)
        lam = {"1": 1., "rho": rho, "grow": max(rho, r / (r + 2.))}[a.lam]; kp = a.keep * rho / ((r + 1) if a.fall else 1); qbar = Q.mean(0)
        sel = rng.choice(a.n, int(round(a.C * a.n)), replace=False); new = {}
        for b0 in range(0, len(sel), a.G):
            group = sel[b0:b0+a.G]; todo = []
            for s, i in zip(loc, group):
                p = parts[i]; n = len(p) // a.bp; s.start(state, llr); pr = torch.bincount(Y[p], minlength=10).float() / len(p); s.lam.fill_(lam); s.ramp.fill_(a.ramp * llr if a.ramp else 1.)
                s.adj.copy_(a.eff * torch.log((pr + lam * qbar + 1e-3) / (1 + lam)) if a.eff else a.la * torch.log(pr.clamp_min(1e-3)))
                if a.mu: m.load_state_dict(state); m.eval(); P[p] = (1 - a.mu) * hot[p] + a.mu * F.softmax(fwd(m, X[p]) + s.adj, 1)  # a bounded step: the label, softened by the server's own opinion
                for ep in range(a.lep): s.ip[ep*n:(ep+1)*n] = p[torch.randperm(len(p), device=dev, generator=gen)[:n*a.bp]].view(n, a.bp)
                if a.bq: s.iq.copy_(torch.randint(nr, s.iq.shape, device=dev, generator=gen))
                s.aug.copy_(draw_aug(s.aug.shape[0] * s.aug.shape[1], a.aug, gen).view_as(s.aug)); todo.append((s, n * a.lep))
                if CUDA: s.stream.wait_stream(torch.cuda.current_stream())
            for t in range(max(n for _, n in todo)):
                for s, n in todo:
                    if t < n:
                        if CUDA:
                            with torch.cuda.stream(s.stream): s.run()
                        else: s.run()
            for (s, _), i in zip(todo, group):
                if CUDA: torch.cuda.current_stream().wait_stream(s.stream)
                new[i] = s.save()
        wt = torch.tensor([len(parts[i]) for i in sel], device=dev).float(); wt /= wt.sum()
        old = state; state = {k: (sum(w * new[i][k].float() for w, i in zip(wt, sel)) if v.is_floating_point() else v) for k, v in new[sel[0]].items()}
        if a.slr != 1: state = {k: v if "running" in k or not v.is_floating_point() else old[k] + a.slr * (v - old[k]) for k, v in state.items()}
        look = a.every and ((r + 1) % a.every == 0 or r == 0 or r + 1 == a.rounds); avg = acc(pred(state, E)) if look else None
        for i in sel: m.load_state_dict(new[i]); m.eval(); bank[i] = (F.softmax(fwd(m, D[:nd]), 1).half(),)
        ids = list(bank)
        def combine(q, j): w = share[ids] @ q.T + 1e-6; w = w / w.sum(0); return sum(w[k][:, None] * bank[i][j].float() for k, i in enumerate(ids))
        Tn = combine(Q[:nd], 0)
        if a.sink: Tn = sinkhorn(Tn, prior)
        T.copy_((1 - kp) * Tn + kp * Q0[:nd]); state = distil(state, dlr)
        if a.rel2 and r + 1 == a.rel2:  # a second release, on the student's features
            m.load_state_dict(state); m.eval(); T0, T0e2, cnt2, rho = release((feats(X), feats(NN), feats(D), feats(E)), a.k2, a.power, 2000 + a.seed)
            before = F.softmax(fwd(m, D), 1); lp = a.mix2 * F.log_softmax(T0, 1) + (1 - a.mix2) * torch.log(before.clamp_min(1e-6)); cnt = cnt + cnt2; share = (cnt / cnt.sum(0).clamp_min(1e-9)).float()
            out["rel2"] = dict(before=acc(fwd(m, E)), head=acc(T0e2), both=acc(a.mix2 * F.log_softmax(T0e2, 1) + (1 - a.mix2) * F.log_softmax(fwd(m, E), 1)), rho=round(rho, 3))
            Q0 = F.softmax(lp, 1); T.copy_(Q0[:nd]); fit_head(torch.log_softmax(lp, 1) - torch.log_softmax(lp, 1).mean(1, keepdim=True), fwd(m.feats, D)); state = {k: v.clone() for k, v in m.state_dict().items()}; out["rel2"]["after"] = acc(fwd(m, E))
        pD = pred(state, D); Qn = sinkhorn(pD, prior) if a.sink else pD; Q.copy_((1 - kp) * Qn + kp * Q0)
        ema = {k: v.clone() for k, v in state.items()} if ema is None else {k: (a.ema * ema[k] + (1 - a.ema) * v if v.is_floating_point() else v) for k, v in state.items()}
        if look: Qe = pred(state, E); hist.append((r + 1, (acc(Qe), acc(pred(ema, E)))))
        if look: print(a.name, "round", r + 1, "avg", avg, "student", hist[-1][1][0], "ema", hist[-1][1][1], "llr", round(llr, 6), round((time.time() - tt) / (r + 1), 2), "s/round", flush=True)
    h = np.array([x for _, x in hist])  # [looks, 2 (student, average over rounds), 1 or 2 (val, test)]
    out.update(last=h[-1].tolist(), best=h.max(0).tolist(), rounds_seen=[r for r, _ in hist], curve=h[:, :, 0].tolist(), s_per_round=round((time.time() - tt) / a.rounds, 2), seconds=round(time.time() - t_start))
    if a.diag:  # class means on the student's features: is there a head better than the student's own?
        m.load_state_dict(state); m.eval(); f = (feats(X), feats(NN), fD, feats(E)); out["diag"] = {"with the first head": [acc(w * F.log_softmax(T0e, 1) + (1 - w) * torch.log(Qe))[0] for w in (.1, .25, .5)]}
        for k in (10, 16, 32, 64):
            for z in (0., MULT[.1], MULT[.1] * math.sqrt(2)):
                sig = z * math.sqrt(2); _, te, _, rh = release(f, k, .5, 5); lp = F.log_softmax(te, 1); out["diag"][f"k{k} noise {z:.0f}"] = [acc(te)[0], round(rh, 2)] + [acc(w * lp + (1 - w) * torch.log(Qe))[0] for w in (.25, .5, .75)]
    rec = dict(vars(a)); rec = {k: v for k, v in rec.items() if v != DEFAULTS[k]}; log.write(json.dumps(dict(job=rec, **out)) + "\n"); log.flush(); print("RESULT", a.name, json.dumps({k: v for k, v in out.items() if k not in ("diag",)}), flush=True)
from contextlib import nullcontext as nullctx

def parse(job):
    kw = dict(DEFAULTS)
    for s in filter(None, job.split(",")): k, v = s.split("=", 1); kw[k] = type(kw[k])(float(v)) if not isinstance(kw[k], str) else v
    kw["name"] = kw["name"] or job
    import argparse; return argparse.Namespace(**kw)

def load(r, limit=None):
    g = lambda n: torch.from_numpy(np.load(f"{r}/{n}.npy", mmap_mode="r")[:limit].copy()).to(dev); d = {}; x, y = g("train"), g("train_y").long()
    hold = np.zeros(len(x), bool); hold[np.random.RandomState(12345).permutation(len(x))[:2000 if limit is None else 20]] = True; hold = torch.from_numpy(hold).to(dev)
    d["x"], d["y"], d["v"], d["yv"] = x[~hold], y[~hold], x[hold], y[hold]; d["xp"] = padded(d["x"]); d["xt"], d["yt"] = g("test"), g("test_y").long()
    d["aux"] = torch.cat([g("aux0"), g("aux1")]); d["auxp"] = padded(d["aux"])
    from safetensors.torch import load_file
    d["h0"] = {k: v.float().to(dev) for k, v in load_file(f"{r}/h0.safetensors").items()}; return d

if __name__ == "__main__":
    t0 = time.time(); lim = None if CUDA else 160; d = load(sys.argv[1], lim); print("loaded", round(time.time() - t0, 1), "s", flush=True)
    def jobs():
        """The command line's jobs, or with --queue FILE the file's lines, taken one by one by all workers, until a line says stop."""
        if sys.argv[3] != "--queue": yield from sys.argv[3:]; return
        import fcntl
        while True:
            with open(sys.argv[4], "r+") as f:
                fcntl.flock(f, fcntl.LOCK_EX); lines = f.read().splitlines(); job = lines[0] if lines else None
                if job and job != "stop": f.seek(0); f.truncate(); f.write("".join(x + "\n" for x in lines[1:])); f.flush()
            if job == "stop": return
            if job is None: time.sleep(1); continue
            yield job
    with open(sys.argv[2], "a") as log:
        for j in jobs():
            try: run(parse(j), d, log)
            except Exception: print("FAILED", j, flush=True); import traceback; traceback.print_exc(); sys.stderr.flush()
            import gc; gc.collect()
            if CUDA: torch.cuda.empty_cache()
