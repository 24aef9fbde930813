"""Heads on features of public and private examples, all clients at once: laboratory trials.

    python notes/lab/heads.py FOLDER

FOLDER has NAME.npz files with features and labels: x, y (private), tx, ty (test), pub (public).
Prints, for each setting, the last round's accuracy on held-out examples, mean of two seeds.
"""
import copy, math, sys
from pathlib import Path
import numpy as np, torch
from torch.nn import functional as Fn
from fedaux.config import Certainty
from fedaux.core.algorithms.fedaux2 import balanced
from fedaux.core.algorithms.private_head import fit_head
from fedaux.privacy.classes import ClassSums
from fedaux.privacy.mechanism import SimulatedNoise
torch.set_num_threads(1)
CACHE={}
def load(name):
    if name not in CACHE:
        d=np.load(Path(sys.argv[1])/f"{name}.npz"); CACHE[name]={k:torch.from_numpy(d[k].astype(np.float32 if d[k].dtype.kind=="f" else np.int64)) for k in d}
    return CACHE[name]
class Setting:
    def __init__(s, data, alpha, K, n, C, eps, seed, rounds=10, pub=None, npub=3000, split="val", delta=1e-5, comps=None):
        d=load(data); s.name=(data if pub is None else data+"-"+pub,alpha,K,n,C,eps); s.seed=seed; s.rounds=rounds; s.C=C; s.K=K
        rng=np.random.default_rng(1000+seed); y=d["y"].numpy(); ncl=int(y.max())+1; s.ncl=ncl
        perm=rng.permutation(len(y)); hold=min(2000,len(y)//5); val,rest=perm[:hold],list(perm[hold:])
        by={c:[i for i in rest if y[i]==c] for c in range(ncl)}
        s.idx=[]
        for k in range(K):
            p=rng.dirichlet(np.full(ncl,alpha)) if alpha<50 else np.full(ncl,1/ncl)
            p=np.where(np.isfinite(p),p,0); p=p/p.sum() if p.sum()>0 else np.eye(ncl)[rng.integers(ncl)]
            cnt=rng.multinomial(n,p); own=[]
            for c in range(ncl):
                take=min(cnt[c],len(by[c])); own+=by[c][:take]; by[c]=by[c][take:]
            if not own:
                c=max(by,key=lambda c:len(by[c])); own=by[c][:n]; by[c]=by[c][n:]
            rng.shuffle(own); s.idx.append(own)
        X=d["x"]; P=(load(pub)["pub"] if pub else d["pub"]); P=P[torch.from_numpy(rng.permutation(len(P))[:npub])]
        s.pub=P
        if split=="val": s.tx,s.ty=X[val],d["y"][val]
        else: s.tx,s.ty=d["tx"],d["ty"]
        nm=max(map(len,s.idx)); s.n=torch.tensor([len(i) for i in s.idx]); F=X.shape[1]; s.F=F
        s.x=torch.zeros(K,nm,F); s.y=torch.full((K,nm),-1)
        for k,i in enumerate(s.idx): s.x[k,:len(i)]=X[i]; s.y[k,:len(i)]=d["y"][i]
        s.counts=torch.stack([torch.bincount(s.y[k][:s.n[k]],minlength=ncl) for k in range(K)]).float()
        # release
        m=ClassSums(Certainty(mechanism="classes",epsilon=eps,delta=delta,components=comps))
        public=m.publish(P,num_classes=ncl,sizes=s.n.tolist())
        vs,sg=[],[]
        for k in range(K):
            r=m.release(s.x[k,:s.n[k]],public,noise=SimulatedNoise(np.random.default_rng(77*seed+k)),labels=s.y[k,:s.n[k]])
            vs.append(torch.as_tensor(r.vector)); sg.append(r.sigma)
        s.est=m.estimate(torch.stack(vs),torch.tensor(sg),public); s.k=public["whitening"].shape[1]
        s.proj=m.project(P,public); s.plog=s.est.logits(s.proj)
        w,b=fit_head(P,s.plog); s.ph=torch.cat([w,b[:,None]],1)  # [C,F+1]
        s.x=Fn.pad(s.x,(0,1),value=1.); s.tx=Fn.pad(s.tx,(0,1),value=1.); s.pub=Fn.pad(s.pub,(0,1),value=1.)
        g=torch.Generator().manual_seed(seed); bound=1/math.sqrt(F)
        s.init=(torch.rand(ncl,F+1,generator=g)*2-1)*bound
        s.schedule=[np.sort(np.random.default_rng([seed,t]).permutation(K)[:max(1,round(C*K))]) for t in range(rounds)]
    def acc(s,W): return 100*float(((s.tx@W.T).argmax(1)==s.ty).float().mean())
    def ph_acc(s): return s.acc(s.ph)
def orders(s,who,t,epochs=1):
    """row indices [len(who), steps*32] and mask"""
    out=[]
    for k in who:
        r=np.random.default_rng([s.seed,t,int(k)]); out.append(np.concatenate([r.permutation(int(s.n[k])) for _ in range(epochs)]))
    L=max(map(len,out)); L=-(-L//32)*32
    ix=torch.full((len(who),L),-1)
    for j,o in enumerate(out): ix[j,:len(o)]=torch.from_numpy(o)
    return ix
def train(s,W0,who,t,*,opt="adam",lr=0.01,epochs=1,corr=None,scorr=None,adjust=None,prox=0.,rehearse=None,reh_w=1.,reh_b=96,loss="ce",wd=None):
    """W0 [C,F+1] or [K',C,F+1]; returns [K',C,F+1]; adjust [K',C] offsets; rehearse q [N,C]"""
    who=torch.as_tensor(who); Kp=len(who); W0=W0.expand(Kp,*W0.shape[-2:]); W=W0.clone(); ix=orders(s,who.tolist(),t,epochs)
    m=torch.zeros_like(W); v=torch.zeros_like(W); cnt=torch.zeros(Kp)
    g=torch.Generator().manual_seed(1000*s.seed+t)
    x=s.x[who]; y=s.y[who]
    for b in range(0,ix.shape[1],32):
        i=ix[:,b:b+32]; ok=i>=0; act=ok.any(1)
        if not act.any(): break
        j=i.clamp_min(0); xb=torch.gather(x,1,j[...,None].expand(-1,-1,x.shape[2])); yb=torch.gather(y,1,j).clamp_min(0)
        z=xb@W.transpose(1,2)
        if adjust is not None: z=z+adjust[:,None,:]
        p=z.softmax(-1); e=p-Fn.one_hot(yb,s.ncl).float(); e=e*ok[...,None]/ok.sum(1).clamp_min(1)[:,None,None]
        G=e.transpose(1,2)@xb
        if rehearse is not None:
            rows=torch.randint(len(s.pub),(reh_b,),generator=g); xp=s.pub[rows]; q=rehearse[rows] if rehearse.ndim==2 else rehearse[:,rows]
            pp=(xp@W.transpose(1,2)).softmax(-1); G=G+(reh_w if not torch.is_tensor(reh_w) else reh_w[:,None,None])*((pp-q)/reh_b).transpose(1,2)@xp
        if prox: G=G+prox*(W-W0)
        if corr is not None: G=G+corr
        a=act[:,None,None].float()
        if opt=="adam":
            cnt+=act.float(); m=torch.where(a>0,.9*m+.1*G,m); v=torch.where(a>0,.999*v+.001*G*G,v); c=cnt.clamp_min(1)[:,None,None]
            W=W-a*lr*(m/(1-.9**c))/((v/(1-.999**c)).sqrt()+1e-8)
        else: W=W-a*lr*G
        if scorr is not None: W=W-a*lr*scorr
    return W
def steps_of(s,who,epochs=1): return epochs*torch.ceil(s.n[torch.as_tensor(who)]/32)
def wmean(W,w): w=w/w.sum(); return torch.einsum("k,kcf->cf",w.float(),W)
def distill(s,W,q,t,lr=0.001,bs=128,opt="adam"):
    g=torch.Generator().manual_seed(555*s.seed+t); perm=torch.randperm(len(s.pub),generator=g); m=torch.zeros_like(W); v=torch.zeros_like(W); c=0
    for b in range(0,len(perm),bs):
        r=perm[b:b+bs]; x=s.pub[r]; G=((x@W.T).softmax(1)-q[r]).T@x/len(r); c+=1
        m=.9*m+.1*G; v=.999*v+.001*G*G; W=W-lr*(m/(1-.9**c))/((v/(1-.999**c)).sqrt()+1e-8)
    return W
def fedavg(s,opt="adam",lr=0.01,prox=0.,start=None,**k):
    W=s.init if start is None else start; out=[]
    for t,who in enumerate(s.schedule):
        W=wmean(train(s,W,who,t,opt=opt,lr=lr,prox=prox,**k),s.n[who]); out.append(s.acc(W))
    return out
def scaffold(s,lr=0.1,start=None,**kw):
    W=s.init if start is None else start; c=torch.zeros(s.K,*W.shape); out=[]
    for t,who in enumerate(s.schedule):
        g=c.mean(0); new=train(s,W,who,t,opt="sgd",lr=lr,corr=g-c[who],**kw)
        K=steps_of(s,who)[:,None,None]
        c[who]=c[who]-g-(new-W)/(K*lr); W=new.mean(0); out.append(s.acc(W))
    return out
def feddyn(s,alpha=0.1,lr=0.1,start=None,opt="sgd",**kw):
    W=s.init if start is None else start; c=torch.zeros(s.K,*W.shape); out=[]
    for t,who in enumerate(s.schedule):
        new=train(s,W,who,t,opt=opt,lr=lr,corr=-c[who],prox=alpha,**kw)
        c[who]=c[who]-alpha*(new-W); W=new.mean(0)-c.mean(0)/alpha; out.append(s.acc(W))
    return out
def pic(s,counts,who):
    sh=torch.ones(len(who))[:,None]*counts[who]; sh=sh.clamp_min(1e-9); return (sh/sh.sum(0)).float()
def head_by(W,before,P):
    r=W-W.mean(1,keepdim=True)+before.mean(0); return torch.einsum("kc,kcf->cf",P,r)
def mapped(s,kind="std",lam=0.1,priv=None):
    """affine map of the features from public examples; E|z|^2=1 on public"""
    r=copy.copy(s); P=s.pub[:,:-1].double(); mu=P.mean(0); X=P-mu; S=X.T@X/len(P); F=S.shape[0]
    if kind=="std": A=torch.eye(F).double()/S.trace().sqrt()
    else:
        ev,U=torch.linalg.eigh(S); l=lam*ev.mean(); pw=-.5 if kind=="white" else -.25
        A=(U*(ev+l)**pw)@U.T; A=A/torch.sqrt((A@S@A).trace())
    f=lambda x:torch.cat([((x[...,:-1].double()-mu)@A).float(),x[...,-1:]],-1)
    r.x,r.tx,r.pub=f(s.x),f(s.tx),f(s.pub); Ai=torch.linalg.inv(A)
    g=lambda W:torch.cat([(W[:,:-1].double()@Ai).float(),(W[:,-1:].double()+W[:,:-1].double()@mu[:,None]).float()],1)
    r.ph=g(s.ph); r.init=torch.zeros_like(s.init)
    return r
def scaled(s,k=16.):
    r=copy.copy(s); g=lambda x:torch.cat([x[...,:-1]*k,x[...,-1:]],-1); r.x,r.tx,r.pub=g(s.x),g(s.tx),g(s.pub); r.ph=torch.cat([s.ph[:,:-1]/k,s.ph[:,-1:]],1); return r
# fedaux2 of commit 0e4eeeb and its parts
def first_edition(e):
    n=e.counts+1e-9; own=n/n.sum(1,keepdim=True); held=torch.exp(-torch.xlogy(own,own).sum(1)); trust=min(1.,2*e.reliability)
    return float(1-(held.mean()-1)/max(1,n.shape[1]-1)),trust,torch.lerp(e.counts.mean(0),e.counts,trust)
def f2v(s,lr=.01,start="now",adj="now",rehw=None,anchor=.5,rate=2.,even=True,smooth=.8,teach=True,fall=True,counts="trusted",dlr=.001,memheads=False,rows="counts",tail="ema",bal=True):
    e=s.est; rho=e.reliability; conc,trust,trusted=first_edition(e); sh={"now":.25*conc*trust,"conc":.5*conc,"half":.5,"full":1.}[start]
    W=torch.lerp(s.init,s.ph,sh); avg=None; out=[]; mem={}; last={}; tc={"trusted":trusted.float(),"counts":e.counts.float()}[counts]; pb=s.plog.softmax(1).float(); pri=s.counts/s.counts.sum(1,keepdim=True)
    off=pri.clamp_min(1e-3).log()*(1-rho) if adj=="now" else ((pri+1/s.ncl)/2).log()
    for t,who in enumerate(s.schedule):
        r=t+1; q=torch.lerp((s.pub@W.T).softmax(1),pb,anchor*rho/r)
        new=train(s,W,who,t,opt="adam",lr=lr,adjust=off[who],rehearse=q,reh_w=rho if rehw is None else rehw)
        for k,w in zip(who,new): last[int(k)]=(w,t)
        ids=sorted(last) if memheads else [int(k) for k in who]; M=torch.stack([last[i][0] for i in ids]); d=torch.tensor([.5**(t-last[i][1]) for i in ids])
        P=(tc[ids].clamp_min(1e-9)+(s.n[ids][:,None]/s.ncl if rows=="joint" else 0))*d[:,None]; P=P/P.sum(0); H=head_by(M,W,P); rt=rate
        if fall and rate>1: rt=rate*(1-conc*.9*min(1,(r-1)/max(1,s.rounds-1)))
        if even:
            l=(H-W)[:,:-1].norm(dim=1).clamp_min(1e-12); H=W+(H-W)*((l.mean()/l)**(0.5/r))[:,None]
        N=W+rt*(H-W)
        if teach:
            for k,w in zip(who,new): mem[int(k)]=(s.pub@w.T)
            im=sorted(mem); Pm=pic(s,tc,im); w=Pm@q.T; w=w/w.sum(0); lab=torch.einsum("kn,knc->nc",w,torch.stack([mem[i].softmax(1) for i in im])); lab=balanced(lab,e.prior) if bal else lab
            N=distill(s,N,lab.float(),t,lr=dlr)
        if tail=="ema":
            mid=(W+N)/2; dd=smooth*min(1,r/30); avg=N.clone() if avg is None else avg*dd+(1-dd)*mid
        else: avg=N.clone() if avg is None else torch.lerp(avg,N,4/(t+4))
        W=N; out.append(s.acc(avg))
    return out
# fedaux2 for heads: control variates, joint adjustment, rehearsal, rows by class; and its variants
def uni(s,lr=.1,start=0.,adj="none",reh=0.,cv=True,rows="",equal=None,teach=False,rate=1.,tail="ema",anchor=0.,bal=True,mem=False,dlr=.001,smooth=.8,reh_b=96,opt="sgd",beta=.5):
    e=s.est; W=torch.lerp(s.init,s.ph,start); avg=None; out=[]; memo={}; last={}
    tc=e.counts.float(); pb=s.plog.softmax(1).float(); pri=s.counts/s.counts.sum(1,keepdim=True)
    off={"none":None,"joint":((pri+1/s.ncl)/2).log(),"full":pri.clamp_min(1e-3).log()}[adj]
    c=torch.zeros(s.K,*W.shape); equal=cv if equal is None else equal
    for t,who in enumerate(s.schedule):
        r=t+1; q=(s.pub@W.T).softmax(1)
        if anchor: q=torch.lerp(q,pb,anchor*e.reliability/r)
        g=c.mean(0)
        new=train(s,W,who,t,opt=opt,lr=lr,adjust=None if off is None else off[who],rehearse=q if reh else None,reh_w=reh,corr=(g-c[who]) if cv and opt=="sgd" else None,scorr=(g-c[who]) if cv and opt=="adam" else None,reh_b=reh_b)
        if cv: c[who]=c[who]-g-(new-W)/(steps_of(s,who)[:,None,None]*lr)
        N=new.mean(0) if equal else wmean(new,s.n[who])
        for k,w in zip(who,new): last[int(k)]=(w,t)
        if rows:
            ids=sorted(last) if mem else [int(k) for k in who]; M=torch.stack([last[i][0] for i in ids]); d=torch.tensor([.5**(t-last[i][1]) for i in ids])
            P=(tc[ids].clamp_min(1e-9)+(s.n[ids][:,None]/s.ncl if rows=="joint" else 0))*d[:,None]; P=P/P.sum(0); N=head_by(M,W,P)
        N=W+rate*(N-W)
        if teach:
            for k,w in zip(who,new): memo[int(k)]=(s.pub@w.T)
            im=sorted(memo); Pm=pic(s,tc,im); w=Pm@q.T; w=w/w.sum(0); lab=torch.einsum("kn,knc->nc",w,torch.stack([memo[i].softmax(1) for i in im])); lab=balanced(lab,e.prior) if bal else lab
            N=distill(s,N,lab.float(),t,lr=dlr)
        if tail=="ema":
            mid=(W+N)/2; dd=smooth*min(1,r/30); avg=N.clone() if avg is None else avg*dd+(1-dd)*mid
        else: avg=N.clone()
        W=N; out.append(s.acc(avg))
    return out
def pooled(s,lr=.1):
    p=copy.copy(s); n=int(s.n.sum()); p.x=torch.cat([s.x[k,:s.n[k]] for k in range(s.K)])[None]; p.y=torch.cat([s.y[k,:s.n[k]] for k in range(s.K)])[None]; p.n=torch.tensor([n]); p.K=1
    p.schedule=[np.array([0])]*s.rounds
    return fedavg(p,"sgd",lr)
NEW=dict(adj="joint",reh=1.,rows="joint",rate=2.)
SETS=[(a,{}) for a in (("cifar10",.01,10,100,.4,.1),("cifar10",.01,50,100,.4,.5),("cifar10",.01,10,600,.4,.5),("cifar10",.1,10,600,.4,.1),("cifar10",1,10,600,.4,.1),("agnews",.01,10,500,.4,.1),("agnews",.1,10,500,1,.1),("mri",.01,8,200,.4,.5),("mri",.1,8,200,1,.5),("digits",.1,10,100,1,.5),("cifar100",.1,20,300,.4,.1),("cifar100",.01,20,300,.4,.5))]
SETS+=[(("cifar10",.01,20,300,C,.1),dict(rounds=20)) for C in (.4,1)]+[(a,{}) for a in (("digits",.01,10,100,.4,.5),("mri",1,8,200,.4,.5),("lite0",.1,20,300,.4,.1))]
if __name__=="__main__":
    for a,kw in SETS:
        r={}
        for seed in (0,1):
            s0=Setting(*a,seed,**kw,**({"npub":900} if a[0]=="mri" else {})); s=scaled(mapped(s0,"half",.1)); add=lambda k,v:r.setdefault(k,[]).append(v)
            add("fedaux2",uni(s,**NEW,start=.5*s0.est.reliability)[-1]); add("no start",uni(s,**NEW)[-1]); add("own rows",uni(s,**{**NEW,"rows":"counts"})[-1]); add("first edition",f2v(s)[-1])
            add("scaffold",uni(s,tail="")[-1]); add("sgd",fedavg(s,"sgd",.1)[-1]); add("prox",fedavg(s,"sgd",.1,prox=.1)[-1]); add("adam",fedavg(s)[-1]); add("private-head",s0.ph_acc()); add("pooled",pooled(s)[-1])
        print(a,{k:round(sum(v)/len(v),1) for k,v in r.items()},flush=True)
