// What both kernels of verify_attn in CUDA C++ are written in, put before either: barriers, bulk copies, clusters and products on Hopper.

typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap {
    u64 opaque[16];
};

#define INF __int_as_float(0x7F800000)
#define INLINE __device__ __forceinline__

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
INLINE void store_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
        ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
INLINE void store_transposed(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
        ::"r"(address), "r"(a), "r"(b) : "memory");
}

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

// Asked how many clusters of a size fit the chip: of the attention kernel's shape, but of no cluster size itself.
extern "C" __global__ void probe() {}
