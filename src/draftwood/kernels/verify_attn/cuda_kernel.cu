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
// "nothing reads my queries", "I have what I was sent". The warpgroups of a rank with blocks never wait at one right after arriving there.

constexpr int HALF = ROWS / 2;
constexpr int J = ROWS / 16;          // groups of 8 rows in a half
constexpr int PITCH = 1024 + 16;      // a row of a partial result, padded against bank conflicts
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

INLINE void store_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
        ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
INLINE void store_transposed(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
        ::"r"(address), "r"(a), "r"(b) : "memory");
}

enum { FIRST, SECOND, ALONE };  // of two blocks; or a single one, which is the last

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
        const u32 elected = elect();
        init_barriers<FULL, FREE, SHARED>(shared, lane);
        cluster_arrive();
        const int mine = page_of_lane(rank, lane);
        const int* table = page_table + (long long)b * M;
        if (elected) prefetch_inputs(q_map, kv_map, tree_map, b * T * H + first_row);
        if (mine < M) asm volatile("prefetch.global.L2 [%0];" ::"l"(table + mine) : "memory");  // to be read after the wait only
        asm volatile("griddepcontrol.wait;" ::: "memory");
        int looked_up = look_up(table, mine, M);
        const int prefix = uniform(clamp(prefix_len[b], 0, M * PAGE)), n = uniform(clamp(n_slots[b], 0, T));
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
                if (turn == 0) looked_up = look_up(table, page_of_lane(i, lane), M);
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
    const int prefix = uniform(clamp(prefix_len[b], 0, M * PAGE)), n = uniform(clamp(n_slots[b], 0, T));
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
            tell_owner<TOLD, KNOWN>(shared, rank, maximum.x, (x.x + x.y) + (x.z + x.w));
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
        auto write_lse = [&](float best, float total) {
            if (part == 0 && row < T * H)
                lse[(long long)b * T * H + row] = row < n * H && best != -INF ? (best + __log2f(total)) * 0.6931471805599453f : -INF;
        };
        weigh_ranks<KNOWN, TOLD, SCALE, true>(shared, -INF, part, parts, own_row, own_rows, write_lse);
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
        const u32 gifts = shared + Q + own_row * PITCH + column * 2, own = result + (rank * SHARE + own_row) * PITCH + column * 2;
        auto add = [&](int part, float w) { add_columns(y, part == rank ? own : gifts + part * (SHARE * PITCH), w); };
        add_ranks(shared + SCALE + own_row * QUADS * 16, row < n * H, parts, add);
        store_columns(o + ((long long)b * T * H + row) * 256 + column / 2, y);
    }
    __syncwarp();
    cluster_wait();
}
