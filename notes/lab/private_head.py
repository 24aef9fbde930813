"""Workshop: estimators of the private head, h0's features, no training. head.py FOLDER OUT. Accuracy on the 2,000 held-out images."""
import json, math, sys, time
import torch
import successor_cifar10 as lab
from successor_cifar10 import dev, fwd, public_map, class_sums, posterior, lda, split, MULT

d = lab.load(sys.argv[1], None if lab.CUDA else 400); m = lab.net(); m.load_state_dict(d["h0"], strict=False); m.eval(); f = open(sys.argv[2], "w")
iN = torch.randperm(len(d["aux"]), generator=torch.Generator().manual_seed(0))[int(.8 * len(d["aux"])):].to(dev); F_ = {}
for mir in (0, 1): F_[mir] = [fwd(m.feats, z, mirror=bool(mir)) for z in (d["x"], d["aux"][iN], d["v"], d["xt"][:1])][:3]
Y, Yv = d["y"], d["yv"]; PARTS = {}
def say(**k): f.write(json.dumps(k) + "\n"); f.flush()

def kmeans(x, K, it=15):
    c = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:K].to(dev)]
    for _ in range(it):
        a = torch.cdist(x, c).argmin(1); n = torch.bincount(a, minlength=K).clamp_min(1); c = torch.zeros_like(c).index_add_(0, a, x) / n[:, None]
    return c, a
def fisher_map(fN, k, K, power):
    """Directions by total over within-cluster variance; clusters of public features stand for classes."""
    mu = fN.mean(0); z = (fN - mu).double(); L, Q = torch.linalg.eigh(torch.cov(z.T)); L = L.clamp_min(L.max() * 1e-6); pre = (Q / L.pow(.25)).float(); c, a = kmeans((z.float() @ pre), K)
    cent = torch.zeros(K, z.shape[1], device=dev, dtype=torch.double).index_add_(0, a, z) / torch.bincount(a, minlength=K).clamp_min(1)[:, None]; W_ = torch.cov((z - cent[a]).T); W_ = W_ + 1e-3 * W_.diagonal().mean() * torch.eye(len(W_), device=dev).double()
    l, q = torch.linalg.eigh(W_); half = q / l.sqrt(); T = half.T @ torch.cov(z.T) @ half; t, p = torch.linalg.eigh(T); t, p = t.flip(0)[:k], p.flip(1)[:, :k]  # total variance t in units of within variance
    s = t.pow(power); W = (half @ p * s).float(); cc = ((fN - mu) @ W).norm(dim=1).median()
    def u(g): y = (g - mu) @ W / cc; return y / y.norm(dim=1, keepdim=True).clamp_min(1)
    return u, s.square() / cc.double()**2
def evaluate(u, v, mir, n, alpha, mult, est="lab"):
    res, rhos = [], []; ux, uv = u(F_[mir][0]), u(F_[mir][2])
    for seed in (0, 1, 2):
        key = (n, alpha, seed)
        if key not in PARTS: PARTS[key] = [torch.from_numpy(p).to(dev) for p in split(Y.cpu().numpy(), n, alpha, seed)]
        S0 = torch.stack([class_sums(ux[p], Y[p]) for p in PARTS[key]])
        for ns in range(3 if mult else 1):
            sig = mult * math.sqrt(2); S = S0 + sig * torch.randn(S0.shape, device=dev, dtype=S0.dtype, generator=torch.Generator(device=dev).manual_seed(100 * seed + ns)); g, e, w, rho = posterior(S, sig, est); res.append((lda(g, e, v)(uv).argmax(1) == Yv).float().mean().item()); rhos.append(rho)
    return round(100 * sum(res) / len(res), 2), round(sum(rhos) / len(rhos), 3)
t0 = time.time()
for n, alpha, mult in ((20, .01, MULT[.1]), (20, 100., MULT[.1]), (20, .01, 0.)):
    for mir in (0, 1):
        for power in (.5, .4, .3, .2, 0.):
            r = {}
            for k in (16, 32, 64, 128, 256, 512): u, v = public_map(F_[mir][1], k, power); r[k] = evaluate(u, v, mir, n, alpha, mult)
            say(map="pca", n=n, alpha=alpha, mult=mult, mir=mir, power=power, acc_rho=r)
    for K in (50, 200):
        for power in (0., .5, 1.):
            r = {}
            for k in (8, 16, 32, 64, 128, 256): u, v = fisher_map(F_[1][1], k, K, power); r[k] = evaluate(u, v, 1, n, alpha, mult)
            say(map="fisher", K=K, n=n, alpha=alpha, mult=mult, mir=1, power=power, acc_rho=r)
    r = {}
    for k in (16, 32, 64, 128, 256): u, v = public_map(F_[1][1], k, .5); r[k] = evaluate(u, v, 1, n, alpha, mult, "pool")
    say(map="pca", est="pool", n=n, alpha=alpha, mult=mult, mir=1, power=.5, acc_rho=r)
say(done=round(time.time() - t0))
