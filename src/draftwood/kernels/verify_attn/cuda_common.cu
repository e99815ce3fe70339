// What both kernels of verify_attn in CUDA C++ are written in, put before either: barriers, bulk copies, clusters and products on Hopper;
// and what both do: look up pages, and merge a cluster's partial results.

typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap {
    u64 opaque[16];
};

#define INF __int_as_float(0x7F800000)
#define INLINE __device__ __forceinline__

constexpr int CHUNK = 64 * 128;       // 64 keys of 64 columns, swizzled by 128 bytes
constexpr int BLOCK = 9 * CHUNK;      // 64 keys
constexpr int PAGES = 64 / PAGE;      // to a block
constexpr int SHARE = (ROWS + CLUSTER - 1) / CLUSTER;  // rows that a rank merges
constexpr int QUADS = (CLUSTER + 3) / 4;
constexpr int LANES = CLUSTER > 8 ? 16 : CLUSTER > 4 ? 8 : CLUSTER > 2 ? 4 : CLUSTER;  // CLUSTER as a power of two, rounded up

template <int N>
struct Number {
    static constexpr int value = N;
};

INLINE void mbarrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
INLINE void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
INLINE void mbarrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
INLINE void mbarrier_wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    }
}
INLINE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
INLINE void meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }  // both warpgroups
// Relaxed: what it orders are finished reads, and barriers' initialisation, which has its own fence.
INLINE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
INLINE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
INLINE u32 at_rank(u32 address, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
INLINE void load_box(u32 to, const TensorMap& map, int chunk, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
        ::"r"(to), "l"(&map), "r"(0), "r"(row), "r"(chunk), "r"(barrier) : "memory");
}
INLINE void tell(u32 to, float x, float y, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
        ::"r"(to), "f"(x), "f"(y), "r"(barrier) : "memory");
}
INLINE void send(u32 to, u32 from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(to), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}

INLINE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
INLINE u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
INLINE float4 load4(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}
INLINE float2 load2(u32 address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}
INLINE void store4(u32 address, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
        ::"r"(address), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
INLINE float load1(u32 address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}
INLINE void store1(u32 address, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory"); }

// Descriptor of an operand in chunks of 128 bytes a line, 8 lines (1024 bytes) to a swizzled group.
INLINE u64 operand(u32 address) { return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62; }

INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the last PENDING groups are done. d is what was computed: nothing that reads it moves before the wait.
template <int PENDING, int N>
INLINE void wgmma_wait(float (&d)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define F4(d, i) "+f"((d)[i]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3])
#define F16(d, i) F4(d, i), F4(d, (i) + 4), F4(d, (i) + 8), F4(d, (i) + 12)

INLINE int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

// Shuffled, so that the compiler sees a warp's lanes agree: products that it thinks some lanes may skip would be serialised.
INLINE int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// True in one lane of the warp.
INLINE u32 elect() {
    u32 elected;
    asm volatile("{.reg .pred p; elect.sync _|p, ~0; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
    return elected;
}
// By one warp: the barriers from FULL to END, of which the two at FREE await both warpgroups.
template <int FULL, int FREE, int END>
INLINE void init_barriers(u32 shared, int lane) {
    if (lane < (END - FULL) / 8) {
        const int address = FULL + 8 * lane;
        mbarrier_init(shared + address, address == FREE || address == FREE + 8 ? 2 : 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async();
    __syncwarp();
}
INLINE void prefetch_inputs(const TensorMap& q_map, const TensorMap& kv_map, const TensorMap& tree_map, int q_row) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&q_map) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&kv_map) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&tree_map) : "memory");
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];"
        ::"l"(&q_map), "r"(0), "r"(q_row), "r"(0) : "memory");
}
// Of a rank's pages from its block `block` on, the one that a lane looks up, 32 at a time.
INLINE int page_of_lane(int block, int lane) { return (block + CLUSTER * (lane / PAGES)) * PAGES + lane % PAGES; }
INLINE int look_up(const int* table, int page, int M) { return page < M ? table[page] : 0; }

// By a thread per row: that row's reference and sum in this rank, to the rank that merges the row.
template <int TOLD, int KNOWN>
INLINE void tell_owner(u32 shared, int rank, float best, float total) {
    const int owner = threadIdx.x / SHARE;
    const u32 to = shared + TOLD + (threadIdx.x % SHARE * CLUSTER + rank) * 8;
    if (owner == rank)
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(best), "f"(total) : "memory");
    else
        tell(at_rank(to, owner), best, total, at_rank(shared + KNOWN, owner));
}

// Weight of rank `part` in row `own_row` of those that this rank merges, from what every rank told of them, a lane to each; and
// write_lse(reference, sum) of the whole row. `none` is the reference of a rank without keys; INFINITE: it is -INF.
template <int KNOWN, int TOLD, int SCALE, bool INFINITE, typename WriteLse>
INLINE void weigh_ranks(u32 shared, float none, int part, int parts, int own_row, int own_rows, WriteLse write_lse) {
    mbarrier_wait(shared + KNOWN, 0);
    float2 told = {none, 0};
    if (part < parts && own_row < own_rows) told = load2(shared + TOLD + (own_row * CLUSTER + part) * 8);
    float best = told.x;
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, step));
    const float weight = INFINITE && best == -INF ? 0 : exp2_fast(told.x - best);
    float total = weight * told.y;
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) total += __shfl_xor_sync(~0u, total, step);
    if (part < CLUSTER && own_row < own_rows) {
        store1(shared + SCALE + (own_row * QUADS * 4 + part) * 4, (INFINITE ? best == -INF : total == 0) ? 0 : __fdividef(weight, total));
        write_lse(best, total);
    }
}

// y += w times columns of a partial result.
template <int STEP>
INLINE void add_columns(float (&y)[STEP], u32 from, float w) {
    u32 v[4];
    if (STEP == 8)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from) : "memory");
    else if (STEP == 4)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(from) : "memory");
    else
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v[0]) : "r"(from) : "memory");
#pragma unroll
    for (int e = 0; e < STEP / 2; e++) {
        y[2 * e] += w * __uint_as_float(v[e] << 16);
        y[2 * e + 1] += w * __uint_as_float(v[e] & 0xFFFF0000);
    }
}
// add(part, weight) of every rank that has keys, if the row is live.
template <typename Add>
INLINE void add_ranks(u32 weights, bool live, int parts, Add add) {
    if (live && parts == CLUSTER) {
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) {
            const float4 f = load4(weights + quad * 16);
            const float w[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (4 * quad + e < CLUSTER) add(4 * quad + e, w[e]);
        }
    } else if (live) {
#pragma unroll 1
        for (int part = 0; part < parts; part++) add(part, load1(weights + part * 4));
    }
}
template <int STEP>
INLINE void store_columns(u32* out, const float (&y)[STEP]) {
    u32 z[4];
#pragma unroll
    for (int e = 0; e < STEP / 2; e++) z[e] = pack(y[2 * e], y[2 * e + 1]);
    if (STEP == 8)
        *reinterpret_cast<uint4*>(out) = {z[0], z[1], z[2], z[3]};
    else if (STEP == 4)
        *reinterpret_cast<uint2*>(out) = {z[0], z[1]};
    else
        *out = z[0];
}

// Asked how many clusters of a size fit the chip: of the attention kernel's shape, but of no cluster size itself.
extern "C" __global__ void probe() {}
