// verify_attn on Hopper (sm_90a) for tiles of 64 rows: as `cuda_kernel.cu` is for smaller ones, with other products and another schedule.
//
// Block i of the keys belongs to rank i mod CLUSTER. Products are not transposed: a tile's rows are the rows of a wgmma. Two blocks make a
// turn, one for each warpgroup:
//
//   loader (1 warp)      the queries, then block after block into two buffers, a third of the columns to a barrier
//   warpgroup w = 0, 1   scores of block w
//                        softmax weights of block w relative to a row's reference, into its rope columns, which nothing reads any more
//                        value columns 256 w .. 256 w + 255 of both blocks, in registers
//
// References are integers that follow the first block's maxima, and later ones only if these are larger by 2^8: then a turn's weights are
// computed again. So the warpgroups meet once a turn.
//
// At the end a rank has a partial result in bfloat16, by quarters of the columns: 64 of each warpgroup. It tells each rank the references
// and sums of the rows that that one merges, copies those rows, quarter by quarter, to where its queries were, and merges the rows that it
// is given itself as they come. Cluster barriers: "I have begun", "nothing reads my queries", "I have what I was sent". The
// warpgroups of a rank with blocks arrive at each long before they wait for it.

constexpr int HALF = 32;              // scores of a thread, and its share of 64 value columns
constexpr int PITCH = 256 + 16;       // 64 columns from each warpgroup of a row of a partial result, padded against bank conflicts
constexpr int Q = 0;                  // offsets into shared memory
constexpr int GIFTS = SHARE * CLUSTER * PITCH;  // a quarter of the columns of the partial results, where the queries were
constexpr int K = ((4 * GIFTS > ROWS * 1152 ? 4 * GIFTS : ROWS * 1152) + 1023) / 1024 * 1024;
constexpr int TOP = K + 2 * BLOCK;         // [row] reference
constexpr int SEEN = TOP + ROWS * 4;       // [warpgroup][row] ancestor bits of a block of the tree
constexpr int SUMS = SEEN + ROWS * 16;     // [row][warpgroup]
constexpr int SCALE = SUMS;                // [row of this rank's share][rank], at the end
constexpr int TOLD = SUMS + ROWS * 32;     // [row of this rank's share][rank] reference and sum
constexpr int FULL = TOLD + SHARE * CLUSTER * 8;  // barriers: [buffer][third of the columns]
constexpr int FREE = FULL + 2 * 3 * 8;
constexpr int ASKED = FREE + 2 * 8;        // queries, [third of the columns]
constexpr int KNOWN = ASKED + 3 * 8;       // references and sums
constexpr int SENT = KNOWN + 8;            // partial results, [quarter of the columns]
constexpr int RAISED = SENT + 4 * 8;       // the last turn in which a reference was raised
constexpr int SHARED = RAISED + 8;
static_assert(SHARED == SHARED_BYTES && SHARED <= 232448, "shared memory");

// A reference is an integer, so that rounding weights to 16 bits is the same whatever it is. Its order as the bits of a float is kept by
// adding MAGIC. Scores (base 2) below LEAST count as nothing.
constexpr float MAGIC = 12582912, LEAST = -4194304;
constexpr float MARGIN = 8;  // by which a row's scores exceed its reference before that follows

// d [64, 64] (+)= a b.
INLINE void multiply(float (&d)[HALF], u64 a, u64 b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;}"
        : F16(d, 0), F16(d, 16) : "l"(a), "l"(b), "r"(add));
}
#define F32_OF(t) F16(d[t], 0), F16(d[t], 16)
// d [64, 256] += a b, where b's columns are those of four chunks, and contiguous, as value columns are in a key's latent.
INLINE void multiply_values(float (&d)[4][HALF], u64 a, u64 b) {
    asm volatile("{wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "%128, %129, 1, 1, 1, 0, 1;}"
        : F32_OF(0), F32_OF(1), F32_OF(2), F32_OF(3) : "l"(a), "l"(b));
}

INLINE int load_int(u32 address) {
    int v;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}
INLINE void store_int(u32 address, int x) { asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory"); }
// Four matrices of 8 x 8.
INLINE void store_matrices(u32 address, const u32 (&w)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
        ::"r"(address), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}

// Combines x, of two rows, over the four lanes that have them. Afterwards x[0] is of `kept_row` in each lane.
template <typename F>
INLINE void across(float (&x)[2], int lane, F f) {
    const bool upper = lane & 2;
    x[0] = f(upper ? x[1] : x[0], __shfl_xor_sync(~0u, upper ? x[0] : x[1], 2));
    x[0] = f(x[0], __shfl_xor_sync(~0u, x[0], 1));
}

// Which of a thread's two rows the x-th number of a product is of.
INLINE constexpr int row_index(int x) { return x / 2 % 2; }

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1) attend(
    const __grid_constant__ TensorMap q_map,     // [9, B T H, 64]: columns in chunks; boxes of 3 chunks of ROWS rows
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

    if (warp >= 8) {  // the loader; registers are moved by warpgroups
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp > 8) return;
        const u32 elected = elect();
        init_barriers<FULL, FREE, RAISED>(shared, lane);
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
            mbarrier_expect(shared + ASKED, ROWS * 384);
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
            auto ask = [&](int x) {  // for more of the queries, between the first block's columns
                if (count > 0 || x == 3) return;
                mbarrier_expect(shared + ASKED + 8 * x, ROWS * 384);
                load_box(shared + Q + 3 * x * ROWS * 128, q_map, 3 * x, b * T * H + first_row, shared + ASKED + 8 * x);
            };
            if (i >= prefix_blocks) {
                if (elected)
#pragma unroll
                    for (int x = 0; x < 3; x++) {
                        mbarrier_expect(full + 8 * x, 3 * CHUNK);
                        load_box(to + 3 * x * CHUNK, tree_map, 3 * x, b * T + 64 * (i - prefix_blocks), full + 8 * x);
                        ask(x + 1);
                    }
            } else {
                const int pages = (min(64, prefix - 64 * i) + PAGE - 1) / PAGE;
                for (int part = 0; part < pages; part++) {
                    const int row = clamp(__shfl_sync(~0u, looked_up, turn + part), 0, n_pages - 1) * PAGE;
                    if (elected)
#pragma unroll
                        for (int x = 0; x < 3; x++) {
                            if (part == 0) mbarrier_expect(full + 8 * x, pages * 3 * PAGE * 128);
                            for (int c = 0; c < 3; c += PAGE == 64 ? 3 : 1)
                                load_box(to + (3 * x + c) * CHUNK + part * PAGE * 128, kv_map, 3 * x + c, row, full + 8 * x);
                            if (part == 0) ask(x + 1);
                        }
                }
            }
            __syncwarp();
        }
        if (elected) {
            const int others = parts - (rank < parts);
            mbarrier_expect(shared + KNOWN, others * own_rows * 8);
            for (int t = 0; t < 4; t++) mbarrier_expect(shared + SENT + 8 * t, others * own_rows * PITCH);
        }
        for (int x = 0; x < (rank < parts ? 3 : 1); x++) mbarrier_wait(shared + ASKED + 8 * x, 0);
        __syncwarp();
        cluster_wait();
        cluster_arrive();
        cluster_wait();
        cluster_arrive();
        cluster_wait();
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    cluster_arrive();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int prefix = uniform(clamp(prefix_len[b], 0, M * PAGE)), n = uniform(clamp(n_slots[b], 0, T));
    const int prefix_blocks = (prefix + 63) / 64;
    const int blocks = first_row < n * H ? prefix_blocks + (n + 63) / 64 : 0;
    const int parts = min(CLUSTER, blocks);
    if (threadIdx.x < ROWS) store1(shared + TOP + 4 * threadIdx.x, LEAST + MAGIC);
    if (threadIdx.x == 0) store_int(shared + RAISED, -1);
    asm volatile("bar.sync 2, 288;" ::: "memory");  // the barriers are there
    const int W = warp / 4, thread = threadIdx.x % 128, in_group = warp % 4;
    // A thread's rows are row_of(0) and so on, and the key of its x-th score is key_of(x).
    const int row_0 = 16 * in_group + lane / 4, key_0 = 2 * (lane % 4);
    auto row_of = [&](int r) { return row_0 + 8 * r; };
    auto key_of = [&](int x) { return key_0 + x / 4 * 8 + x % 2; };
    float acc[4][HALF], top[2], sum[2];
#pragma unroll
    for (int x = 0; x < 4 * HALF; x++) acc[x / HALF][x % HALF] = 0;
#pragma unroll
    for (int r = 0; r < 2; r++) top[r] = LEAST, sum[r] = 0;
    const int kept_row = row_of(lane >> 1 & 1);
    float kept_top = LEAST;

    auto keys_of = [&](int i) { return i < blocks ? min(64, i < prefix_blocks ? prefix - 64 * i : n - 64 * (i - prefix_blocks)) : 0; };
    const u32 keys = shared + K + W * BLOCK;
    auto add_values = [&](int buffer, int steps) {  // of 16 keys each, to all of this warpgroup's columns
        const u32 block = shared + K + buffer * BLOCK;
        const u64 values = operand(block + 4 * W * CHUNK) + ((u64)(CHUNK / 16 - 1) << 16), p = operand(block + 8 * CHUNK);
#pragma unroll
        for (int k = 0; k < steps; k++) multiply_values(acc, p + 2 * k, values + k * 2048 / 16);
    };
    auto meet_in_group = [&]() {
        if (W == 0)
            asm volatile("bar.sync 3, 128;" ::: "memory");
        else
            asm volatile("bar.sync 4, 128;" ::: "memory");
    };
    float s[HALF], fresh[2];  // scores of a turn, and sums of its weights
    auto look_up_references = [&]() {
#pragma unroll
        for (int r = 0; r < 2; r++) top[r] = load1(shared + TOP + 4 * row_of(r)) - MAGIC;
        kept_top = load1(shared + TOP + 4 * kept_row) - MAGIC;
    };
    auto weigh = [&](bool busy, bool last) {
#pragma unroll
        for (int r = 0; r < 2; r++) fresh[r] = 0;
        if (busy) {
#pragma unroll
            for (int x = 0; x < HALF / 8; x++) {
                float p[8];
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    p[e] = exp2_fast(s[8 * x + e] - top[row_index(8 * x + e)]);
                    fresh[row_index(8 * x + e)] += p[e];
                }
                const u32 w[4] = {pack(p[0], p[1]), pack(p[2], p[3]), pack(p[4], p[5]), pack(p[6], p[7])};
                store_matrices(keys + 8 * CHUNK + (16 * in_group + lane % 16) * 128 + ((2 * x + lane / 16) ^ lane % 8) * 16, w);
            }
        }
        if (last) {
            float all[2];
#pragma unroll
            for (int r = 0; r < 2; r++) all[r] = sum[r] + fresh[r];
            across(all, lane, [](float x, float y) { return x + y; });
            store1(shared + SUMS + (kept_row * 2 + W) * 4, all[0]);
        }
        fence_async();
        meet();
    };
    int i = rank;
    for (int turn = 0; i < blocks; i += 2 * CLUSTER, turn++) {
        const bool two = i + CLUSTER < blocks, last = i + 2 * CLUSTER >= blocks, busy = W == 0 || two;
        if (busy) {
            const int block = i + W * CLUSTER, live = keys_of(block);
            const bool of_tree = block >= prefix_blocks;
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < 9; c++) {
                if (c % 3 == 0) {
                    mbarrier_wait(shared + ASKED + c / 3 * 8, 0);
                    mbarrier_wait(shared + FULL + 24 * W + c / 3 * 8, turn & 1);
                }
                const u64 a = operand(keys + c * CHUNK), q = operand(shared + Q + c * ROWS * 128);
#pragma unroll
                for (int k = 0; k < 4; k++) multiply(s, q + 2 * k, a + 2 * k, c + k);
            }
            wgmma_commit();
            if (of_tree) {
                if (thread < ROWS) {
                    const int slot = (first_row + thread) / H;
                    const u64 bits = slot < n ? ancestors[((long long)b * T + slot) * words + (block - prefix_blocks)] : 0;
                    asm volatile("st.shared.u64 [%0], %1;" ::"r"(shared + SEEN + 8 * (W * ROWS + thread)), "l"(bits) : "memory");
                }
                meet_in_group();
            }
            wgmma_wait<0>(s);
            // A weight of 0 does not hide a NaN. Of the last turn's second block nothing past its first half is read, if that is all.
            const int end = last && W == 1 && live <= 32 ? 32 : 64;
            for (int line = live + thread / 64; line < end; line += 2)
                store4(keys + thread % 64 / 8 * CHUNK + line * 128 + thread % 8 * 16, 0, 0, 0, 0);
#pragma unroll
            for (int x = 0; x < HALF; x++) s[x] *= scale_log2;
            if (live < 64 || of_tree)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    u64 seen = ~0ull;
                    if (of_tree)
                        asm volatile("ld.shared.u64 %0, [%1];" : "=l"(seen) : "r"(shared + SEEN + 8 * (W * ROWS + row_of(r))) : "memory");
#pragma unroll
                    for (int x = 0; x < HALF; x++)
                        if (row_index(x) == r && (key_of(x) >= live || !(seen >> key_of(x) & 1))) s[x] = -INF;
                }
            float peak[2];
#pragma unroll
            for (int r = 0; r < 2; r++) peak[r] = -INF;
#pragma unroll
            for (int x = 0; x < HALF; x++) peak[row_index(x)] = fmaxf(peak[row_index(x)], s[x]);
            across(peak, lane, [](float x, float y) { return fmaxf(x, y); });
            const bool leads = turn == 0 && W == 0;
            if (turn == 0 && W == 1) {
                asm volatile("bar.sync 5, 256;" ::: "memory");
                look_up_references();
            }
            if (peak[0] > kept_top + MARGIN) {
                asm volatile("red.shared.max.s32 [%0], %1;" ::"r"(shared + TOP + 4 * kept_row), "r"(__float_as_int(peak[0] + MAGIC))
                    : "memory");
                if (!leads) store_int(shared + RAISED, turn);
            }
            if (turn > 0 || leads) meet_in_group();  // nothing reads the rope columns any more
            if (leads) {
                look_up_references();
                if (two) asm volatile("bar.arrive 5, 256;" ::: "memory");
            }
        }
        weigh(busy, last);
        if (load_int(shared + RAISED) == turn) {
            float decay[2];
#pragma unroll
            for (int r = 0; r < 2; r++) decay[r] = top[r];
            look_up_references();
#pragma unroll
            for (int r = 0; r < 2; r++) {
                decay[r] = exp2_fast(decay[r] - top[r]);
                sum[r] *= decay[r];
            }
#pragma unroll
            for (int t = 0; t < 4; t++)
#pragma unroll
                for (int y = 0; y < HALF; y++) acc[t][y] *= decay[row_index(y)];
            weigh(busy, last);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) sum[r] += fresh[r];
        if (last) {
            cluster_wait();
            cluster_arrive();  // nothing reads the queries any more
            break;
        }
        wgmma_fence();
#pragma unroll
        for (int buffer = 0; buffer < 2; buffer++) {
            add_values(buffer, 4);
            wgmma_commit();
        }
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (thread == 0) mbarrier_arrive(shared + FREE);
#pragma unroll
        for (int t = 0; t < 4; t++) wgmma_wait<0>(acc[t]);
        if (thread == 0) mbarrier_arrive(shared + FREE + 8);
    }

    const int more = keys_of(i + CLUSTER);  // in the last turn's second block
    // This rank's partial result, where a block was.
    const u32 part_at = shared + K + (more > 0 ? 0 : BLOCK);  // [quarter of the columns][row]
    if (rank >= parts) {
        cluster_wait();
        cluster_arrive();
        cluster_wait();
    } else {
        auto tell_sums = [&]() {
            if (threadIdx.x < ROWS) {
                const float2 sums = load2(shared + SUMS + threadIdx.x * 8);
                tell_owner<TOLD, KNOWN>(shared, rank, load1(shared + TOP + threadIdx.x * 4) - MAGIC, sums.x + sums.y);
            }
            __syncwarp();
            cluster_wait();
        };
        const u32 to = part_at + 128 * W + (16 * in_group + lane % 16) * PITCH + lane / 16 * 16;
        auto deliver = [&](int t) {
#pragma unroll
            for (int x = 0; x < HALF / 8; x++) {
                const float* d = &acc[t][8 * x];
                const u32 w[4] = {pack(d[0], d[1]), pack(d[2], d[3]), pack(d[4], d[5]), pack(d[6], d[7])};
                store_matrices(to + t * ROWS * PITCH + x * 32, w);
            }
            fence_async();
            meet();
            if (lane == 0)
#pragma unroll 1
                for (int other = warp; other < CLUSTER; other += 8) {
                    const int rows = clamp(ROWS - other * SHARE, 0, SHARE);
                    if (other != rank && rows > 0)
                        send(at_rank(shared + Q + t * GIFTS + rank * SHARE * PITCH, other),
                             part_at + (t * ROWS + other * SHARE) * PITCH, rows * PITCH, at_rank(shared + SENT + 8 * t, other));
                }
            __syncwarp();
        };
        auto finish = [&](auto steps) {  // of the second block
            wgmma_fence();
            add_values(0, 4);
            add_values(1, steps.value);
            wgmma_commit();
            tell_sums();
#pragma unroll
            for (int t = 0; t < 4; t++) wgmma_wait<0>(acc[t]);
            meet();  // nothing reads the blocks any more
#pragma unroll
            for (int t = 0; t < 4; t++) deliver(t);
        };
        if (more > 32)
            finish(Number<4>());
        else if (more > 0)
            finish(Number<2>());
        else
            finish(Number<0>());
    }

    // Each rank's weight in each of this rank's rows, while the results are on their way.
    if (warp < (SHARE * LANES + 31) / 32) {
        const int part = threadIdx.x % LANES, own_row = threadIdx.x / LANES, row = first_row + rank * SHARE + own_row;
        auto write_lse = [&](float best, float total) {
            if (part == 0 && row < T * H)
                lse[(long long)b * T * H + row] = row < n * H && total != 0 ? (best + __log2f(total)) * 0.6931471805599453f : -INF;
        };
        weigh_ranks<KNOWN, TOLD, SCALE, false>(shared, LEAST, part, parts, own_row, own_rows, write_lse);
    }
    meet();

    constexpr int STEP = SHARE >= 16 ? 8 : SHARE >= 8 ? 4 : 2;  // columns of a thread at a time
#pragma unroll 1
    for (int t = 0; t < 4; t++) {
        mbarrier_wait(shared + SENT + 8 * t, 0);
        if (t == 3) {
            __syncwarp();
            cluster_arrive();
        }
        for (int x = threadIdx.x; x < own_rows * (128 / STEP); x += 256) {
            const int own_row = x / (128 / STEP), column = x % (128 / STEP) * STEP, row = first_row + rank * SHARE + own_row;
            if (row >= T * H) break;
            float y[STEP];
#pragma unroll
            for (int e = 0; e < STEP; e++) y[e] = 0;
            const u32 gifts = shared + Q + t * GIFTS + own_row * PITCH + column * 2;
            const u32 own = part_at + (t * ROWS + rank * SHARE + own_row) * PITCH + column * 2;
            auto add = [&](int part, float w) { add_columns(y, part == rank ? own : gifts + part * (SHARE * PITCH), w); };
            add_ranks(shared + SCALE + own_row * QUADS * 16, row < n * H, parts, add);
            store_columns(o + ((long long)b * T * H + row) * 256 + column / 64 * 128 + 32 * t + column % 64 / 2, y);
        }
    }
    __syncwarp();
    cluster_wait();
}
