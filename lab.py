import time, sys, torch

t0 = time.time()


def say(*a):
    print(f"[{time.time() - t0:6.1f}]", *a, flush=True)


from sparse_compile import sparse_compile
from sparse_compile.models.presets import preset_config, random_model
from sparse_compile.runtime.plan import RowPlan
from sparse_compile.runtime.graphs import BucketKey

with torch.device("cuda"):
    model = random_model(preset_config("ouro-1.4b"), torch.bfloat16)
say("model", torch.cuda.memory_allocated() / 1e9)
from sparse_compile import validation as V

old = V.compare


def compare(*a):
    r = old(*a)
    ex = V.float32_logits(a[0], a[1], a[2])
    say(
        "ours vs fp32",
        r,
        "own vs fp32",
        V.relative_error(a[3], ex),
        "ours vs own",
        V.relative_error(a[4], a[3]),
    )
    return 0.0, 1.0


V.compare = compare
c = sparse_compile(model, key_retention=0.1, progress=False, prefill_chunk=8192)
say("compiled and validated", c.program.counts())
make = c._keeper.make_engine


def bench(batch, ctx):
    total = ctx + 64
    e = make(batch, total)
    say("engine", batch, ctx, torch.cuda.memory_allocated() / 1e9)
    for t in (e.pool.k_pool, e.pool.v_pool):
        for p in range(t.shape[0]):
            t[p].normal_()
    seats = e.plans.seats
    g = e.executor
    for b in range(batch):
        pages = e.pool.allocate(e.pool.spec.pages_for(total))
        s = seats.take(pages)
        lease = e.store.acquire(str(b), 0)
    res = {}
    for kind in ("dense", "sparse"):
        packed = torch.zeros(8, batch, dtype=torch.int32)
        packed[0] = torch.arange(1, batch + 1)
        packed[1] = ctx - 1
        packed[2] = ctx
        packed[4] = torch.arange(1, batch + 1) if kind == "sparse" else 0
        packed[5] = 3 if kind == "sparse" else 1
        packed[7] = 5
        plan = RowPlan(seats.block_table, packed.cuda(), torch.arange(batch).cuda(), kind, ctx, ())
        t = time.time()
        logits = g.decode(plan).clone()
        torch.cuda.synchronize()
        cap = time.time() - t
        times = []
        for _ in range(15):
            a, b_ = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            g.decode(plan)
            b_.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b_))
        times.sort()
        res[kind] = times[len(times) // 2]
        same = torch.equal(logits, g.decode(plan))
        say(
            f"{batch}x{ctx} {kind}: {res[kind]:.2f} ms  first call {cap:.1f}s same={same} finite={bool(logits.isfinite().all())}"
        )
    return e, plan


e, plan = bench(2, 32768)
from torch.profiler import profile, ProfilerActivity

with profile(activities=[ProfilerActivity.CUDA]) as prof:
    for _ in range(3):
        e.executor.decode(plan)
    torch.cuda.synchronize()
rows = sorted(prof.key_averages(), key=lambda r: -r.self_device_time_total)[:22]
for r in rows:
    print(f"   {r.self_device_time_total / 3000:7.3f} ms {r.count // 3:5d} {r.key[:90]}")
del e, plan
torch.cuda.empty_cache()
for b, ctx in ((32, 1900), (8, 8192), (1, 1024)):
    e, plan = bench(b, ctx)
    if b == 32:
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            for _ in range(3):
                e.executor.decode(plan)
            torch.cuda.synchronize()
        rows = sorted(prof.key_averages(), key=lambda r: -r.self_device_time_total)[:16]
        for r in rows:
            print(f"   {r.self_device_time_total / 3000:7.3f} ms {r.count // 3:5d} {r.key[:90]}")
    del e, plan
    torch.cuda.empty_cache()
# time to first token
from sparse_compile.runtime.request import SamplingParams

for n, length in ((1, 8192), (8, 2048)):
    ids = torch.randint(3, 40000, (n, length), device="cuda")
    e = make(n, length + 16)

    def ours():
        for row in ids:
            e.add_request(row.tolist(), SamplingParams(max_new_tokens=1))
        while e.has_unfinished():
            e.step()
        torch.cuda.synchronize()

    with torch.no_grad():

        def hf():
            model(ids, use_cache=True, logits_to_keep=1)
            torch.cuda.synchronize()

        def hf_all():
            model(ids, use_cache=True)
            torch.cuda.synchronize()

        for name, f in (("ours", ours), ("hf last logit", hf), ("hf all logits", hf_all)):
            best = []
            try:
                for _ in range(4):
                    t = time.time()
                    f()
                    best.append(time.time() - t)
                say(
                    f"ttft {n}x{length} {name}: first {best[0] * 1e3:.0f} ms, best {min(best[1:]) * 1e3:.1f} ms"
                )
            except Exception as ex:
                say(name, repr(ex)[:300])
    del e
    torch.cuda.empty_cache()
say("warmup")
