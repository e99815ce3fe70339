// verify_attn for few tiles, on Hopper (sm_90a): a cluster of CLUSTER thread blocks shares a tile's keys and merges through shared memory.
//
// A tile is ROWS rows (slot, head) of one request. Its keys come in blocks of 64: the prefix, page by page, then the tree. Block i
// belongs to rank i mod CLUSTER, so a rank looks up its first pages before it knows any length. Latents are 512 + 64 wide.
//
// All products are transposed: keys and value columns are the 64 rows of a wgmma, and the tile's rows its ROWS columns, which may be few.
//
//   loader (1 warp)      the queries, then block after block into two buffers, a third of the columns to a barrier
//   warpgroup w = 0, 1   scores of all keys from half of the columns; gives the other its sums for one half of the rows
//                        softmax of half w of the rows: maxima through shared memory, weights into the block's rope columns, which
//                        nothing reads any more
//                        value columns 256 w .. 256 w + 255 of all rows, in registers
//
// Blocks are taken in twos: the products for the second one's scores run beside the first one's softmax, and those of the first one's
// values beside the second one's softmax.
//
// At the end a rank has a partial result in bfloat16, [row][column]. It tells each rank the maxima and sums of the rows that that one
// merges, copies those rows to where its queries were, and merges the rows that it is given itself. Cluster barriers: "I have begun",
// "nothing reads my queries", "I have what I was sent". Nobody waits at one right after arriving there.

constexpr int HALF = ROWS / 2;
constexpr int J = ROWS / 16;          // groups of 8 rows in a half
constexpr int CHUNK = 64 * 128;       // 64 keys of 64 columns, swizzled by 128 bytes
constexpr int BLOCK = 9 * CHUNK;      // 64 keys
constexpr int PITCH = 1024 + 16;      // a row of a partial result, padded against bank conflicts
constexpr int SHARE = (ROWS + CLUSTER - 1) / CLUSTER;  // rows that a rank merges
constexpr int QUADS = (CLUSTER + 3) / 4;
constexpr int LANES = CLUSTER > 8 ? 16 : CLUSTER > 4 ? 8 : CLUSTER > 2 ? 4 : CLUSTER;  // CLUSTER as a power of two, rounded up
constexpr int Q = 0;                  // offsets into shared memory
constexpr int GIFTS = SHARE * CLUSTER * PITCH;  // partial results, where the queries were
constexpr int K = ((GIFTS > ROWS * 1152 ? GIFTS : ROWS * 1152) + 1023) / 1024 * 1024;
constexpr int GIVEN = K + 2 * BLOCK;  // sums of scores from warpgroup 0 to warpgroup 1; the other way they go through the rope columns
constexpr int PEAKS = GIVEN + ROWS * 128;  // [row][warp]
constexpr int SUMS = GIVEN;                // [row][warp], at the end
constexpr int SEEN = PEAKS + ROWS * 16;    // [row] ancestor bits of a block of the tree; at the end maxima
constexpr int DECAY = SEEN + ROWS * 8;     // [row]
constexpr int TOLD = DECAY + ROWS * 4;     // [row of this rank's share][rank] maximum and sum
constexpr int SCALE = PEAKS;               // [row of this rank's share][rank], at the end
constexpr int FULL = TOLD + SHARE * CLUSTER * 8;  // barriers: [buffer][third of the columns]
constexpr int FREE = FULL + 2 * 3 * 8;
constexpr int ASKED = FREE + 2 * 8;        // queries
constexpr int KNOWN = ASKED + 8;           // maxima and sums
constexpr int SENT = KNOWN + 8;            // partial results
constexpr int SHARED = SENT + 8;
static_assert(SHARED == SHARED_BYTES && SHARED <= 232448, "shared memory");

// d [64, ROWS] (+)= a b; TRANSPOSED: a's rows are contiguous, as value columns are in a key's latent.
template <int TRANSPOSED>
INLINE void multiply(float (&d)[HALF], u64 a, u64 b, int add) {
#if ROWS == 16
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %10, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, %11, 0;}"
        : F4(d, 0), F4(d, 4) : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED));
#else
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, %19, 0;}"
        : F16(d, 0) : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED));
#endif
}

enum { FIRST, SECOND, ALONE };  // of two blocks; or a single one, which is the last
template <int N>
struct Number {
    static constexpr int value = N;
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(288, 1) attend(
    const __grid_constant__ TensorMap q_map,     // [9, B T H, 64]: columns in chunks; boxes of all chunks of ROWS rows
    const __grid_constant__ TensorMap kv_map,    // [9, n_pages PAGE, 64], boxes of PAGE rows, of 3 chunks where these are 64
    const __grid_constant__ TensorMap tree_map,  // [9, B T, 64], boxes of 3 chunks of 64 rows
    // none of them __restrict__: the compiler would load before the wait for what precedes this launch
    const int* page_table, const int* prefix_len, const int* n_slots, const u64* ancestors, u32* o, float* lse, float scale_log2,
    int T, int H, int M, int n_pages, int words
) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = (u32)__cvta_generic_to_shared(memory);
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int rank = blockIdx.x % CLUSTER, first_row = blockIdx.x / CLUSTER * ROWS, b = blockIdx.y;
    const int own_rows = clamp(ROWS - rank * SHARE, 0, SHARE);

    if (warp == 8) {  // the loader
        u32 elected;
        asm volatile("{.reg .pred p; elect.sync _|p, ~0; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
        if (lane < (SHARED - FULL) / 8) {
            const int address = FULL + 8 * lane;
            mbarrier_init(shared + address, address == FREE || address == FREE + 8 ? 2 : 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_async();
        __syncwarp();
        cluster_arrive();
        constexpr int PAGES = 64 / PAGE;  // to a block
        // Which of this rank's pages a lane looks up, 32 at a time.
        const int mine = (rank + CLUSTER * (lane / PAGES)) * PAGES + lane % PAGES;
        const int* table = page_table + (long long)b * M;
        if (elected) {
            asm volatile("prefetch.tensormap [%0];" ::"l"(&q_map) : "memory");
            asm volatile("prefetch.tensormap [%0];" ::"l"(&kv_map) : "memory");
            asm volatile("prefetch.tensormap [%0];" ::"l"(&tree_map) : "memory");
            asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];"
                ::"l"(&q_map), "r"(0), "r"(b * T * H + first_row), "r"(0) : "memory");
        }
        if (mine < M) asm volatile("prefetch.global.L2 [%0];" ::"l"(table + mine) : "memory");  // to be read after the wait only
        asm volatile("griddepcontrol.wait;" ::: "memory");
        int looked_up = mine < M ? table[mine] : 0;
        // shuffled, so that the compiler sees a warp's lanes agree
        const int prefix = __shfl_sync(~0u, clamp(prefix_len[b], 0, M * PAGE), 0), n = __shfl_sync(~0u, clamp(n_slots[b], 0, T), 0);
        const int prefix_blocks = (prefix + 63) / 64;
        const int blocks = first_row < n * H ? prefix_blocks + (n + 63) / 64 : 0;
        const int parts = min(CLUSTER, blocks);
        if (elected) {
            mbarrier_expect(shared + ASKED, ROWS * 1152);
            load_box(shared + Q, q_map, 0, b * T * H + first_row, shared + ASKED);
        }
        asm volatile("bar.arrive 2, 288;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        int count = 0;
        for (int i = rank; i < blocks; i += CLUSTER, count++) {
            const int buffer = count & 1, turn = count * PAGES & 31;
            if (count > 1) {
                if (turn == 0) {
                    const int at = (i + CLUSTER * (lane / PAGES)) * PAGES + lane % PAGES;
                    looked_up = at < M ? table[at] : 0;
                }
                mbarrier_wait(shared + FREE + 8 * buffer, (count / 2 - 1) & 1);
            }
            const u32 to = shared + K + buffer * BLOCK, full = shared + FULL + 24 * buffer;
            constexpr int order[3] = {0, 2, 1};
            if (i >= prefix_blocks) {
                if (elected)
#pragma unroll
                    for (int x = 0; x < 3; x++) {
                        mbarrier_expect(full + 8 * order[x], 3 * CHUNK);
                        load_box(to + 3 * order[x] * CHUNK, tree_map, 3 * order[x], b * T + 64 * (i - prefix_blocks), full + 8 * order[x]);
                    }
            } else {
                const int pages = (min(64, prefix - 64 * i) + PAGE - 1) / PAGE;
                for (int part = 0; part < pages; part++) {
                    const int row = clamp(__shfl_sync(~0u, looked_up, turn + part), 0, n_pages - 1) * PAGE;
                    if (elected)
#pragma unroll
                        for (int x = 0; x < 3; x++) {
                            if (part == 0) mbarrier_expect(full + 8 * order[x], pages * 3 * PAGE * 128);
                            for (int c = 0; c < 3; c += PAGE == 64 ? 3 : 1)
                                load_box(to + (3 * order[x] + c) * CHUNK + part * PAGE * 128, kv_map, 3 * order[x] + c, row, full + 8 * order[x]);
                        }
                }
            }
            __syncwarp();
        }
        if (elected) {
            const int others = parts - (rank < parts);
            mbarrier_expect(shared + KNOWN, others * own_rows * 8);
            mbarrier_expect(shared + SENT, others * own_rows * PITCH);
        }
        mbarrier_wait(shared + ASKED, 0);
        __syncwarp();
        cluster_wait();
        cluster_arrive();
        cluster_wait();
        cluster_arrive();
        cluster_wait();
        return;
    }

    cluster_arrive();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // products that the compiler thinks some lanes may skip would be serialised
    const int prefix = __shfl_sync(~0u, clamp(prefix_len[b], 0, M * PAGE), 0), n = __shfl_sync(~0u, clamp(n_slots[b], 0, T), 0);
    const int prefix_blocks = (prefix + 63) / 64;
    const int blocks = first_row < n * H ? prefix_blocks + (n + 63) / 64 : 0;
    const int parts = min(CLUSTER, blocks);
    asm volatile("bar.sync 2, 288;" ::: "memory");  // the barriers are there
    const int W = warp / 4, thread = threadIdx.x % 128, in_group = warp % 4;
    const int row_0 = 2 * (lane % 4);                  // of 8, that this thread has in a product; and the next
    const int key_0 = 16 * in_group + lane / 4;        // of 64, or value column, likewise; and 8 further
    float acc[4][HALF], top[2 * J], sum[2 * J];
#pragma unroll
    for (int i = 0; i < 4 * HALF; i++) acc[i / HALF][i % HALF] = 0;
#pragma unroll
    for (int i = 0; i < 2 * J; i++) top[i] = -INF, sum[i] = 0;

    mbarrier_wait(shared + ASKED, 0);
    float s[HALF];
    auto score = [&](int buffer, int turn) {  // of the 64 keys in a buffer: issue the products
        const u32 keys = shared + K + buffer * BLOCK;
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < 5; c++) {  // warpgroup 0: chunks 0 1 2, 3 4; warpgroup 1: 6 7 8, 5
            if (c == 4 && W == 1) break;
            if (c % 3 == 0) mbarrier_wait(shared + FULL + 8 * (3 * buffer + (c == 0 ? 2 * W : 1)), turn & 1);
            const int chunk = c + W * (c < 3 ? 6 : 2);
            const u64 a = operand(keys + chunk * CHUNK), q = operand(shared + Q + chunk * ROWS * 128);
#pragma unroll
            for (int k = 0; k < 4; k++) multiply<0>(s, a + 2 * k, q + 2 * k, c + k);
        }
    };
    int count = 0, i = rank;
    auto step = [&](auto which) {
        constexpr int role = which.value, buffer = role == SECOND;
        const u32 keys = shared + K + buffer * BLOCK, weights = keys + 8 * CHUNK;
        const bool of_tree = i >= prefix_blocks, last = role == ALONE || (role == SECOND && i + CLUSTER >= blocks);
        const int live = min(64, of_tree ? n - 64 * (i - prefix_blocks) : prefix - 64 * i);

        if (buffer == 0) {
            score(0, count / 2);
            wgmma_commit();
        }
        if (of_tree && threadIdx.x < ROWS) {
            const int slot = (first_row + threadIdx.x) / H;
            const u64 bits = slot < n ? ancestors[((long long)b * T + slot) * words + (i - prefix_blocks)] : 0;
            asm volatile("st.shared.u64 [%0], %1;" ::"r"(shared + SEEN + 8 * threadIdx.x), "l"(bits) : "memory");
        }
        if (role != SECOND) wgmma_wait<0>(s);

        // One half of the rows goes to the other warpgroup.
#pragma unroll
        for (int j = 0; j < J; j++) {
            float give[4];
#pragma unroll
            for (int e = 0; e < 4; e++) give[e] = W ? s[4 * j + e] : s[4 * (J + j) + e];
            store4((W ? weights : shared + GIVEN) + (j * 128 + thread) * 16, give[0], give[1], give[2], give[3]);
        }
        meet();
        if (last) {
            cluster_wait();
            cluster_arrive();  // nothing reads the queries any more
        }
        if (live % 16 != 0) {        // a weight of 0 does not hide a NaN
            const int lines = 16 - live % 16;
            for (int x = threadIdx.x; x < lines * 64; x += 256)
                store4(keys + x / 8 % 8 * CHUNK + (live + x / 64) * 128 + x % 8 * 16, 0, 0, 0, 0);
        }
        float v[4 * J];
#pragma unroll
        for (int j = 0; j < J; j++) {
            const float4 x = load4((W ? shared + GIVEN : weights) + (j * 128 + thread) * 16);
            const float given[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int e = 0; e < 4; e++) v[4 * j + e] = ((W ? s[4 * (J + j) + e] : s[4 * j + e]) + given[e]) * scale_log2;
        }
#pragma unroll
        for (int x = 0; x < 4 * J; x++) asm volatile("" : "+f"(v[x])::"memory");  // done with s
        if (role == FIRST) {
            score(1, count / 2);
            wgmma_commit();
        }
        if (of_tree || live < 64) {
#pragma unroll
            for (int j = 0; j < J; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    u64 seen = ~0ull;
                    if (of_tree)
                        asm volatile("ld.shared.u64 %0, [%1];" : "=l"(seen)
                            : "r"(shared + SEEN + 8 * (W * HALF + 8 * j + row_0 + e)) : "memory");
                    if (key_0 >= live || !(seen >> key_0 & 1)) v[4 * j + e] = -INF;
                    if (key_0 + 8 >= live || !(seen >> (key_0 + 8) & 1)) v[4 * j + 2 + e] = -INF;
                }
        }
        float peak[2 * J];
#pragma unroll
        for (int r = 0; r < 2 * J; r++) peak[r] = fmaxf(v[r / 2 * 4 + r % 2], v[r / 2 * 4 + r % 2 + 2]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
#pragma unroll
            for (int r = 0; r < 2 * J; r++) peak[r] = fmaxf(peak[r], __shfl_xor_sync(~0u, peak[r], step));
        if (lane < 4)
#pragma unroll
            for (int r = 0; r < 2 * J; r++)
                store1(shared + PEAKS + (W * HALF + r / 2 * 8 + row_0 + r % 2) * 16 + in_group * 4, peak[r]);
        meet();

        float decay[2 * J];
#pragma unroll
        for (int r = 0; r < 2 * J; r++) {
            const float4 x = load4(shared + PEAKS + (W * HALF + r / 2 * 8 + row_0 + r % 2) * 16);
            const float before = top[r];
            top[r] = fmaxf(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), before);
            const float base = top[r] == -INF ? 0 : top[r];
            decay[r] = exp2_fast(before - base);
            float& p = v[r / 2 * 4 + r % 2];
            float& p_8 = v[r / 2 * 4 + r % 2 + 2];
            p = exp2_fast(p - base);
            p_8 = exp2_fast(p_8 - base);
            sum[r] = sum[r] * decay[r] + (p + p_8);
        }
        {
            const int group = 2 * in_group + lane / 8 % 2;
            u32 w[2 * J];
#pragma unroll
            for (int x = 0; x < 2 * J; x++) w[x] = pack(v[2 * x], v[2 * x + 1]);
#if ROWS == 16
            store_transposed(weights + (W * HALF + lane % 8) * 128 + (group ^ lane % 8) * 16, w[0], w[1]);
#else
#pragma unroll
            for (int x = 0; x < J / 2; x++)
                store_transposed(weights + (W * HALF + 16 * x + lane % 8 + lane / 16 * 8) * 128 + (group ^ lane % 8) * 16, w[4 * x], w[4 * x + 1], w[4 * x + 2], w[4 * x + 3]);
#endif
        }
        if (count > 0 && warp % 4 == 0 && lane < 4)
#pragma unroll
            for (int r = 0; r < 2 * J; r++) store1(shared + DECAY + (W * HALF + r / 2 * 8 + row_0 + r % 2) * 4, decay[r]);
        if (last) {
#pragma unroll
            for (int step = 4; step < 32; step *= 2)
#pragma unroll
                for (int r = 0; r < 2 * J; r++) sum[r] += __shfl_xor_sync(~0u, sum[r], step);
            if (lane < 4)
#pragma unroll
                for (int r = 0; r < 2 * J; r++) {
                    const int row = W * HALF + r / 2 * 8 + row_0 + r % 2;
                    store1(shared + SUMS + row * 16 + in_group * 4, sum[r]);
                    if (in_group == 0) store1(shared + SEEN + row * 8, top[r]);
                }
        }
        fence_async();
        if (role == SECOND) {
#pragma unroll
            for (int t = 0; t < 4; t++) wgmma_wait<0>(acc[t]);
            if (thread == 0) mbarrier_arrive(shared + FREE);
        }
        meet();

        if (role == FIRST) wgmma_wait<0>(s);
        if (count > 0)
#pragma unroll
            for (int j = 0; j < 2 * J; j++) {
                const float2 d = load2(shared + DECAY + (8 * j + row_0) * 4);
#pragma unroll
                for (int t = 0; t < 4; t++)
                    acc[t][4 * j] *= d.x, acc[t][4 * j + 1] *= d.y, acc[t][4 * j + 2] *= d.x, acc[t][4 * j + 3] *= d.y;
            }
        wgmma_fence();
        const u64 values = operand(keys + 4 * W * CHUNK), p = operand(weights);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (16 * k < live)
#pragma unroll
                for (int t = 0; t < 4; t++) multiply<1>(acc[t], values + (t * CHUNK + k * 2048) / 16, p + 2 * k, 1);
        wgmma_commit();
        if (last && threadIdx.x < ROWS) {
            const float4 x = load4(shared + SUMS + threadIdx.x * 16);
            const float2 maximum = load2(shared + SEEN + threadIdx.x * 8);
            const int owner = threadIdx.x / SHARE;
            const u32 to = shared + TOLD + (threadIdx.x % SHARE * CLUSTER + rank) * 8;
            const float total = (x.x + x.y) + (x.z + x.w);
            if (owner == rank)
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(maximum.x), "f"(total) : "memory");
            else
                tell(at_rank(to, owner), maximum.x, total, at_rank(shared + KNOWN, owner));
        }
        if (buffer == 1) {
#pragma unroll
            for (int t = 0; t < 4; t++) wgmma_wait<0>(acc[t]);
            if (thread == 0) mbarrier_arrive(shared + FREE + 8 * buffer);
        }
        i += CLUSTER, count++;
    };
    while (i + CLUSTER < blocks) {
        step(Number<FIRST>());
        step(Number<SECOND>());
    }
    if (i < blocks) step(Number<ALONE>());
#pragma unroll
    for (int t = 0; t < 4; t++) wgmma_wait<0>(acc[t]);

    // The buffer that the last block is not in.
    const u32 result = shared + K + (count & 1) * BLOCK;
    if (rank < parts) {
        const int column = 256 * W + 16 * in_group + lane / 8 % 2 * 8;
        const u32 to = result + (lane % 8 + 8 * (lane / 16)) * PITCH + column * 2;
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
            for (int x = 0; x < J; x++) {
                const float* d = &acc[t][8 * x];
                store_transposed(
                    to + x * 16 * PITCH + t * 128, pack(d[0], d[1]), pack(d[2], d[3]), pack(d[4], d[5]), pack(d[6], d[7]));
            }
        fence_async();
    } else {
        __syncwarp();
        cluster_wait();
        cluster_arrive();
    }
    __syncwarp();
    cluster_wait();
    meet();
    if (rank < parts && lane == 0)
        for (int to = warp; to < CLUSTER; to += 8) {
            const int rows = clamp(ROWS - to * SHARE, 0, SHARE);
            if (to != rank && rows > 0)
                send(at_rank(shared + Q + rank * SHARE * PITCH, to), result + to * SHARE * PITCH, rows * PITCH,
                     at_rank(shared + SENT, to));
        }
    __syncwarp();

    // Each rank's weight in each of this rank's rows, while the results are on their way.
    if (warp < (SHARE * LANES + 31) / 32) {
        const int part = threadIdx.x % LANES, own_row = threadIdx.x / LANES, row = first_row + rank * SHARE + own_row;
        mbarrier_wait(shared + KNOWN, 0);
        float2 told = {-INF, 0};
        if (part < parts && own_row < own_rows) told = load2(shared + TOLD + (own_row * CLUSTER + part) * 8);
        float best = told.x;
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, step));
        const float weight = best == -INF ? 0 : exp2_fast(told.x - best);
        float total = weight * told.y;
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) total += __shfl_xor_sync(~0u, total, step);
        if (part < CLUSTER && own_row < own_rows) {
            store1(shared + SCALE + (own_row * QUADS * 4 + part) * 4, best == -INF ? 0 : __fdividef(weight, total));
            if (part == 0 && row < T * H)
                lse[(long long)b * T * H + row] = row < n * H && best != -INF ? (best + __log2f(total)) * 0.6931471805599453f : -INF;
        }
    }
    mbarrier_wait(shared + SENT, 0);
    meet();
    cluster_arrive();

    constexpr int STEP = SHARE > 3 ? 8 : SHARE > 1 ? 4 : 2;  // columns of a thread at a time
    for (int x = threadIdx.x; x < own_rows * (512 / STEP); x += 256) {
        const int own_row = x / (512 / STEP), column = x % (512 / STEP) * STEP, row = first_row + rank * SHARE + own_row;
        if (row >= T * H) break;
        float y[STEP];
#pragma unroll
        for (int e = 0; e < STEP; e++) y[e] = 0;
        const u32 given = shared + Q + own_row * PITCH + column * 2, own = result + (rank * SHARE + own_row) * PITCH + column * 2;
        auto add = [&](int part, float w) {
            const u32 at = part == rank ? own : given + part * (SHARE * PITCH);
            u32 v[4];
            if (STEP == 8)
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at) : "memory");
            else if (STEP == 4)
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(at) : "memory");
            else
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v[0]) : "r"(at) : "memory");
#pragma unroll
            for (int e = 0; e < STEP / 2; e++) {
                y[2 * e] += w * __uint_as_float(v[e] << 16);
                y[2 * e + 1] += w * __uint_as_float(v[e] & 0xFFFF0000);
            }
        };
        const u32 scales = shared + SCALE + own_row * QUADS * 16;
        if (row < n * H && parts == CLUSTER) {
#pragma unroll
            for (int quad = 0; quad < QUADS; quad++) {
                const float4 f = load4(scales + quad * 16);
                const float w[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (4 * quad + e < CLUSTER) add(4 * quad + e, w[e]);
            }
        } else if (row < n * H) {
#pragma unroll 1
            for (int part = 0; part < parts; part++) add(part, load1(scales + part * 4));
        }
        u32* out = o + ((long long)b * T * H + row) * 256 + column / 2;
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
    __syncwarp();
    cluster_wait();
}
