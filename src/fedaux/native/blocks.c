/* Convolution, group normalisation and ReLU of small maps in one pass, and their gradients.
 *
 * Maps are [examples, positions, channels] in single precision; features are a multiple of LANES. A few examples are
 * worked on at a time, as many as stay in the processor's cache: their maps are copied into a border of zeros, and
 * every product is computed in tiles that stay in registers. What comes out for an example does not depend on the
 * others; sums over examples are made in the same order every time, for as many threads.
 */

#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX__)
#define LANES 8
#define TILE_VECTORS 2
#else
#define LANES 4
#define TILE_VECTORS 4
#endif
#define TILE_ROWS 6
#define CACHE_FLOATS 8192  /* of the maps that are worked on at a time */
#define CHAIN_FLOATS 32768 /* of the maps between two blocks of a chain */
#define MOST_BLOCKS 64     /* of a chain */
#define MOST_THREADS 64

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t mask __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    int64_t models, batch;            /* of each model so many examples */
    int64_t channels, height, width;  /* of the maps that come in */
    int64_t features;                 /* channels of the maps that go out */
    int64_t kernel_height, kernel_width, stride_height, stride_width, padding_height, padding_width;
    int64_t groups;
    double epsilon;
} Block;

typedef struct {
    int64_t out_height, out_width, positions; /* of the maps that go out */
    int64_t padded_width, padded;             /* numbers of a map with its border */
    int64_t taps, depth;                      /* depth: taps times channels */
    int64_t chunk;                            /* examples that are worked on at a time */
    int64_t *at;                              /* where each row of a chunk begins in the padded maps */
    int64_t *tap;                             /* where each number of a row lies from there */
    float *maps, *weights, *rows, *sums, *gradients;
    void *memory;
} Plan;

INLINE vector load(const float *from) { return *(const vector *)from; }
INLINE void store(float *to, vector value) { *(vector *)to = value; }

static int64_t bytes_of(int64_t count, int64_t size) { return (count * size + 63) / 64 * 64; }

static int64_t out_positions(const Block *block)
{
    int64_t height = (block->height + 2 * block->padding_height - block->kernel_height) / block->stride_height + 1;
    int64_t width = (block->width + 2 * block->padding_width - block->kernel_width) / block->stride_width + 1;
    return height * width;
}

static int plan_for(const Block *block, Plan *plan, int with_gradients)
{
    plan->out_height = (block->height + 2 * block->padding_height - block->kernel_height) / block->stride_height + 1;
    plan->out_width = (block->width + 2 * block->padding_width - block->kernel_width) / block->stride_width + 1;
    plan->positions = plan->out_height * plan->out_width;
    plan->padded_width = block->width + 2 * block->padding_width;
    plan->padded = (block->height + 2 * block->padding_height) * plan->padded_width * block->channels;
    plan->taps = block->kernel_height * block->kernel_width;
    plan->depth = plan->taps * block->channels;
    int64_t each = plan->padded + plan->positions * block->features;
    plan->chunk = each > CACHE_FLOATS ? 1 : CACHE_FLOATS / each;
    if (plan->chunk > block->batch)
        plan->chunk = block->batch;
    int64_t rows = plan->chunk * plan->positions;
    int64_t sizes[] = {
        bytes_of(rows, sizeof(int64_t)),
        bytes_of(plan->depth, sizeof(int64_t)),
        bytes_of(plan->chunk * plan->padded, sizeof(float)),
        bytes_of(plan->depth * block->features, sizeof(float)),
        bytes_of(rows * block->features, sizeof(float)),
        bytes_of(4 * block->features, sizeof(float)),
        with_gradients ? bytes_of(plan->depth * block->features + plan->chunk * plan->padded, sizeof(float)) : 0,
    };
    int64_t total = 64;
    for (size_t index = 0; index < sizeof(sizes) / sizeof(*sizes); index++)
        total += sizes[index];
    plan->memory = malloc((size_t)total);
    if (plan->memory == NULL)
        return 1;
    char *place = (char *)(((uintptr_t)plan->memory + 63) / 64 * 64);
    plan->at = (int64_t *)place, place += sizes[0];
    plan->tap = (int64_t *)place, place += sizes[1];
    plan->maps = (float *)place, place += sizes[2];
    plan->weights = (float *)place, place += sizes[3];
    plan->rows = (float *)place, place += sizes[4];
    plan->sums = (float *)place, place += sizes[5];
    plan->gradients = (float *)place;
    int64_t row = 0;
    for (int64_t example = 0; example < plan->chunk; example++)
        for (int64_t down = 0; down < plan->out_height; down++)
            for (int64_t across = 0; across < plan->out_width; across++)
                plan->at[row++] =
                    example * plan->padded +
                    (down * block->stride_height * plan->padded_width + across * block->stride_width) * block->channels;
    int64_t number = 0;
    for (int64_t down = 0; down < block->kernel_height; down++)
        for (int64_t across = 0; across < block->kernel_width; across++)
            for (int64_t channel = 0; channel < block->channels; channel++)
                plan->tap[number++] = (down * plan->padded_width + across) * block->channels + channel;
    memset(plan->maps, 0, (size_t)(plan->chunk * plan->padded) * sizeof(float)); /* the border stays zero */
    return 0;
}

/* Copy maps into their border, or out of it. */
INLINE void bordered(const Block *block, const Plan *plan, float *maps, float *padded, int64_t count, int inwards)
{
    size_t line = (size_t)(block->width * block->channels) * sizeof(float);
    for (int64_t example = 0; example < count; example++)
        for (int64_t down = 0; down < block->height; down++) {
            float *plain = maps + (example * block->height + down) * block->width * block->channels;
            float *inside = padded + example * plan->padded +
                            ((down + block->padding_height) * plan->padded_width + block->padding_width) *
                                block->channels;
            if (inwards)
                memcpy(inside, plain, line);
            else
                memcpy(plain, inside, line);
        }
}

/* Weights [features, channels, taps] as [taps, channels, features], or back. */
static void pack(const Block *block, const Plan *plan, const float *weights, float *packed)
{
    for (int64_t feature = 0; feature < block->features; feature++)
        for (int64_t channel = 0; channel < block->channels; channel++)
            for (int64_t tap = 0; tap < plan->taps; tap++)
                packed[(tap * block->channels + channel) * block->features + feature] = *weights++;
}

static void unpack(const Block *block, const Plan *plan, const float *packed, float *weights)
{
    for (int64_t feature = 0; feature < block->features; feature++)
        for (int64_t channel = 0; channel < block->channels; channel++)
            for (int64_t tap = 0; tap < plan->taps; tap++)
                *weights++ = packed[(tap * block->channels + channel) * block->features + feature];
}

/* Weights [features, channels, taps] as [features, taps, channels]. */
static void pack_transposed(const Block *block, const Plan *plan, const float *weights, float *packed)
{
    for (int64_t feature = 0; feature < block->features; feature++)
        for (int64_t channel = 0; channel < block->channels; channel++)
            for (int64_t tap = 0; tap < plan->taps; tap++)
                packed[(feature * plan->taps + tap) * block->channels + channel] = *weights++;
}

/* rows[TILE_ROWS, vectors] of the convolution: the sum over the depth of what a row sees times the weights. */
INLINE void convolve_tile(
    const Block *block, const Plan *plan, const int64_t *at, int64_t valid, float *output, int64_t first, int vectors)
{
    vector sums[TILE_ROWS][TILE_VECTORS];
    const float *sees[TILE_ROWS];
    for (int row = 0; row < TILE_ROWS; row++) {
        sees[row] = plan->maps + at[row < valid ? row : valid - 1];
        for (int index = 0; index < vectors; index++)
            sums[row][index] = (vector){};
    }
    const float *weights = plan->weights + first;
    for (int64_t down = 0; down < block->kernel_height; down++) {
        int64_t line = block->kernel_width * block->channels; /* neighbours across lie side by side */
        int64_t from = down * plan->padded_width * block->channels;
        for (int64_t number = 0; number < line; number++, weights += block->features) {
            vector weight[TILE_VECTORS];
            for (int index = 0; index < vectors; index++)
                weight[index] = load(weights + index * LANES);
            for (int row = 0; row < TILE_ROWS; row++) {
                float value = sees[row][from + number];
                for (int index = 0; index < vectors; index++)
                    sums[row][index] += value * weight[index];
            }
        }
    }
    for (int row = 0; row < TILE_ROWS && row < valid; row++)
        for (int index = 0; index < vectors; index++)
            store(output + row * block->features + first + index * LANES, sums[row][index]);
}

static void convolve(const Block *block, const Plan *plan, int64_t rows, float *output)
{
    for (int64_t row = 0; row < rows; row += TILE_ROWS) {
        float *to = output + row * block->features;
        int64_t first = 0;
        for (; first + TILE_VECTORS * LANES <= block->features; first += TILE_VECTORS * LANES)
            convolve_tile(block, plan, plan->at + row, rows - row, to, first, TILE_VECTORS);
        for (; first < block->features; first += LANES)
            convolve_tile(block, plan, plan->at + row, rows - row, to, first, 1);
    }
}

/* Sums over the channels of each group, times `factor`, for each of its channels. */
static void share(const Block *block, const float *sums, float factor, float *shared)
{
    int64_t size = block->features / block->groups;
    for (int64_t group = 0; group < block->groups; group++) {
        float sum = 0;
        for (int64_t channel = 0; channel < size; channel++)
            sum += sums[group * size + channel];
        for (int64_t channel = 0; channel < size; channel++)
            shared[group * size + channel] = sum * factor;
    }
}

/* Mean and inverse deviation of each channel's group, [features] each. */
static void statistics(const Block *block, const Plan *plan, const float *maps, float *means, float *inverses)
{
    int64_t features = block->features;
    float factor = 1.0f / (float)(plan->positions * (features / block->groups));
    for (int64_t first = 0; first < features; first += LANES) {
        vector sum = {};
        for (int64_t position = 0; position < plan->positions; position++)
            sum += load(maps + position * features + first);
        store(inverses + first, sum);
    }
    share(block, inverses, factor, means);
    for (int64_t first = 0; first < features; first += LANES) {
        vector mean = load(means + first), sum = {};
        for (int64_t position = 0; position < plan->positions; position++) {
            vector apart = load(maps + position * features + first) - mean;
            sum += apart * apart;
        }
        store(plan->sums + first, sum);
    }
    share(block, plan->sums, factor, inverses);
    for (int64_t feature = 0; feature < features; feature++)
        inverses[feature] = 1.0f / sqrtf(inverses[feature] + (float)block->epsilon);
}

int64_t lanes(void) { return LANES; }

/* outputs = relu(gamma * (convolution - mean) / deviation + beta) of `count` examples, at most a chunk, of a model whose
 * weights have been packed. */
static void forward_chunk(
    const Block *block, const Plan *plan, const float *inputs, const float *gamma, const float *beta, int64_t count,
    float *outputs, float *convolved, float *kept)
{
    int64_t features = block->features, size = plan->positions * features;
    float *rows = convolved ? convolved : plan->rows;
    bordered(block, plan, (float *)inputs, plan->maps, count, 1);
    convolve(block, plan, count * plan->positions, rows);
    for (int64_t example = 0; example < count; example++) {
        float *means = kept ? kept + example * 2 * features : plan->sums + 2 * features;
        statistics(block, plan, rows + example * size, means, means + features);
        for (int64_t first = 0; first < features; first += LANES) {
            vector factor = load(gamma + first) * load(means + features + first);
            vector offset = load(beta + first) - load(means + first) * factor;
            for (int64_t position = 0; position < plan->positions; position++) {
                int64_t place = example * size + position * features + first;
                vector value = load(rows + place) * factor + offset;
                mask below = value < (vector){}; /* NaN stays NaN */
                store(outputs + place, (vector)((mask)value & ~below));
            }
        }
    }
}

/* Work on examples begin to end; `part` says as which of the threads. Returns 1 where there is no memory. */
typedef int (*Work)(void *task, int64_t begin, int64_t end, int64_t part);

typedef struct {
    Work work;
    void *task;
    int64_t begin, end, part;
    int failed;
} Share;

static void *do_share(void *given)
{
    Share *share = given;
    share->failed = share->work(share->task, share->begin, share->end, share->part);
    return NULL;
}

/* Let threads share the examples, each a run of neighbours. */
static int shared(Work work, void *task, int64_t count, int64_t threads)
{
    Share shares[MOST_THREADS];
    pthread_t others[MOST_THREADS];
    int started[MOST_THREADS] = {0}, failed = 0;
    for (int64_t part = 0; part < threads; part++)
        shares[part] = (Share){work, task, part * count / threads, (part + 1) * count / threads, part, 0};
    for (int64_t part = 1; part < threads; part++)
        started[part] = pthread_create(&others[part], NULL, do_share, &shares[part]) == 0;
    do_share(&shares[0]);
    for (int64_t part = 1; part < threads; part++) {
        if (started[part])
            pthread_join(others[part], NULL);
        else
            do_share(&shares[part]);
    }
    for (int64_t part = 0; part < threads; part++)
        failed = failed || shares[part].failed;
    return failed;
}

static int64_t threads_for(const Block *block, int64_t threads)
{
    threads = threads > MOST_THREADS ? MOST_THREADS : threads;
    threads = threads > block->batch ? block->batch : threads;
    return threads < 1 ? 1 : threads;
}

typedef struct {
    const Block *block;
    const float *inputs, *weights, *gamma, *beta;
    float *outputs, *convolved, *kept;
} Forward;

static int forward_part(void *given, int64_t begin, int64_t end, int64_t part)
{
    (void)part;
    const Forward *task = given;
    Block block = *task->block;
    Plan plan;
    block.batch = end - begin;
    if (plan_for(&block, &plan, 0))
        return 1;
    int64_t size = plan.positions * block.features, input_size = block.height * block.width * block.channels;
    pack(&block, &plan, task->weights, plan.weights);
    for (int64_t place = begin; place < end; place += plan.chunk)
        forward_chunk(
            &block, &plan, task->inputs + place * input_size, task->gamma, task->beta,
            end - place < plan.chunk ? end - place : plan.chunk, task->outputs + place * size,
            task->convolved + place * size, task->kept + place * 2 * block.features);
    free(plan.memory);
    return 0;
}

/* Outputs [models, batch, positions, features] of a block for inputs [models, batch, positions, channels].
 *
 * `convolved`, of the same shape, keeps the convolution for `backward`, and `kept` mean and inverse deviation of each
 * channel, [models, batch, 2, features]. Returns 1 where there is no memory.
 */
int forward(
    const Block *block, const float *inputs, const float *weights, const float *gamma, const float *beta,
    float *outputs, float *convolved, float *kept, int64_t threads)
{
    Forward task = {block, inputs, weights, gamma, beta, outputs, convolved, kept};
    int64_t features = block->features, size = out_positions(block) * features * block->batch;
    int failed = 0;
    for (int64_t model = 0; model < block->models && !failed; model++) {
        failed = shared(forward_part, &task, block->batch, threads_for(block, threads));
        task.inputs += block->batch * block->height * block->width * block->channels;
        task.weights += features * block->channels * block->kernel_height * block->kernel_width;
        task.gamma += features, task.beta += features;
        task.outputs += size, task.convolved += size, task.kept += block->batch * 2 * features;
    }
    return failed;
}

typedef struct {
    const Block *blocks;
    int64_t count, model;
    const float *const *parameters;
    const float *inputs;
    float *outputs;
} Prediction;

static int predict_part(void *given, int64_t begin, int64_t end, int64_t part)
{
    (void)part;
    const Prediction *task = given;
    int64_t count = task->count, model = task->model, largest = 1, made = 0;
    Plan plans[MOST_BLOCKS];
    int failed = 0;
    for (int64_t index = 0; index < count && !failed; index++) {
        Block block = task->blocks[index];
        block.batch = end - begin;
        failed = plan_for(&block, &plans[index], 0);
        if (failed)
            break;
        made++;
        const float *weights = task->parameters[3 * index] + model * plans[index].depth * block.features;
        pack(&block, &plans[index], weights, plans[index].weights);
        if (plans[index].positions * block.features > largest)
            largest = plans[index].positions * block.features;
    }
    int64_t together = largest > CHAIN_FLOATS ? 1 : CHAIN_FLOATS / largest;
    float *maps = failed ? NULL : malloc((size_t)(2 * together * largest) * sizeof(float));
    failed = failed || maps == NULL;
    const Block *first = task->blocks;
    for (int64_t place = begin; place < end && !failed; place += together) {
        int64_t examples = end - place < together ? end - place : together;
        const float *from = task->inputs + place * first->height * first->width * first->channels;
        for (int64_t index = 0; index < count; index++) {
            const Block *block = &task->blocks[index];
            const Plan *plan = &plans[index];
            int64_t size = plan->positions * block->features;
            int64_t size_before = block->height * block->width * block->channels;
            float *to = index + 1 == count ? task->outputs + place * size : maps + (index % 2) * together * largest;
            for (int64_t done = 0; done < examples; done += plan->chunk)
                forward_chunk(
                    block, plan, from + done * size_before, task->parameters[3 * index + 1] + model * block->features,
                    task->parameters[3 * index + 2] + model * block->features,
                    examples - done < plan->chunk ? examples - done : plan->chunk, to + done * size, NULL, NULL);
            from = to;
        }
    }
    free(maps);
    while (made > 0)
        free(plans[--made].memory);
    return failed;
}

/* Outputs [models, batch, positions, features] of a chain of blocks, for predictions: a few examples go through all of
 * them before the next ones do. Inputs are [batch, positions, channels] for each model, where `own_inputs`, or for all.
 * `parameters` are weights, gamma and beta of each block in turn, of all models.
 */
int predict(
    const Block *blocks, int64_t count, const float *const *parameters, const float *inputs, int64_t own_inputs,
    float *outputs, int64_t threads)
{
    if (count < 1 || count > MOST_BLOCKS)
        return 1;
    const Block *last = &blocks[count - 1];
    Prediction task = {blocks, count, 0, parameters, inputs, outputs};
    int failed = 0;
    for (; task.model < blocks->models && !failed; task.model++) {
        failed = shared(predict_part, &task, blocks->batch, threads_for(blocks, threads));
        task.inputs += own_inputs ? blocks->batch * blocks->height * blocks->width * blocks->channels : 0;
        task.outputs += blocks->batch * out_positions(last) * last->features;
    }
    return failed;
}

/* gradients[depth, features] += the sum over rows of what a row sees times its gradient. */
INLINE void weight_tile(
    const Block *block, const Plan *plan, int64_t rows, int64_t number, float *gradients, int64_t first, int vectors)
{
    vector sums[TILE_ROWS][TILE_VECTORS];
    const float *sees[TILE_ROWS];
    int64_t valid = plan->depth - number;
    for (int tap = 0; tap < TILE_ROWS; tap++) {
        sees[tap] = plan->maps + plan->tap[number + (tap < valid ? tap : valid - 1)];
        for (int index = 0; index < vectors; index++)
            sums[tap][index] = (vector){};
    }
    const float *gradient = plan->rows + first;
    for (int64_t row = 0; row < rows; row++, gradient += block->features) {
        int64_t at = plan->at[row];
        vector own[TILE_VECTORS];
        for (int index = 0; index < vectors; index++)
            own[index] = load(gradient + index * LANES);
        for (int tap = 0; tap < TILE_ROWS; tap++) {
            float value = sees[tap][at];
            for (int index = 0; index < vectors; index++)
                sums[tap][index] += value * own[index];
        }
    }
    for (int tap = 0; tap < TILE_ROWS && tap < valid; tap++)
        for (int index = 0; index < vectors; index++) {
            float *to = gradients + (number + tap) * block->features + first + index * LANES;
            store(to, load(to) + sums[tap][index]);
        }
}

/* maps += for one tap, the rows' gradients times the transposed weights, where the rows see the maps. */
INLINE void input_tile(
    const Block *block, const Plan *plan, int64_t row, int64_t valid, int64_t tap, float *maps, int64_t first,
    int vectors)
{
    vector sums[TILE_ROWS][TILE_VECTORS];
    const float *own[TILE_ROWS];
    for (int index = 0; index < TILE_ROWS; index++) {
        own[index] = plan->rows + (row + (index < valid ? index : valid - 1)) * block->features;
        for (int part = 0; part < vectors; part++)
            sums[index][part] = (vector){};
    }
    const float *weights = plan->weights + tap * block->channels + first;
    for (int64_t feature = 0; feature < block->features; feature++, weights += plan->depth) {
        vector weight[TILE_VECTORS];
        for (int part = 0; part < vectors; part++)
            weight[part] = load(weights + part * LANES);
        for (int index = 0; index < TILE_ROWS; index++) {
            float value = own[index][feature];
            for (int part = 0; part < vectors; part++)
                sums[index][part] += value * weight[part];
        }
    }
    for (int index = 0; index < TILE_ROWS && index < valid; index++) {
        float *to = maps + plan->at[row + index] + plan->tap[tap * block->channels] + first;
        for (int part = 0; part < vectors; part++)
            store(to + part * LANES, load(to + part * LANES) + sums[index][part]);
    }
}

static void input_numbers(
    const Block *block, const Plan *plan, int64_t row, int64_t count, int64_t tap, float *maps, int64_t channel)
{
    const float *weights = plan->weights + tap * block->channels + channel;
    for (int64_t index = row; index < row + count; index++) {
        float sum = 0;
        for (int64_t feature = 0; feature < block->features; feature++)
            sum += plan->rows[index * block->features + feature] * weights[feature * plan->depth];
        maps[plan->at[index] + plan->tap[tap * block->channels] + channel] += sum;
    }
}

static void weight_gradients(const Block *block, const Plan *plan, int64_t rows, float *gradients)
{
    for (int64_t number = 0; number < plan->depth; number += TILE_ROWS) {
        int64_t first = 0;
        for (; first + TILE_VECTORS * LANES <= block->features; first += TILE_VECTORS * LANES)
            weight_tile(block, plan, rows, number, gradients, first, TILE_VECTORS);
        for (; first < block->features; first += LANES)
            weight_tile(block, plan, rows, number, gradients, first, 1);
    }
}

static void input_gradients(const Block *block, const Plan *plan, int64_t rows, float *maps)
{
    for (int64_t tap = 0; tap < plan->taps; tap++)
        for (int64_t row = 0; row < rows; row += TILE_ROWS) {
            int64_t first = 0;
            for (; first + TILE_VECTORS * LANES <= block->channels; first += TILE_VECTORS * LANES)
                input_tile(block, plan, row, rows - row, tap, maps, first, TILE_VECTORS);
            for (; first + LANES <= block->channels; first += LANES)
                input_tile(block, plan, row, rows - row, tap, maps, first, 1);
            for (; first < block->channels; first++) /* images have few channels, and rarely need a gradient */
                input_numbers(block, plan, row, rows - row < TILE_ROWS ? rows - row : TILE_ROWS, tap, maps, first);
        }
}

/* Back through ReLU and normalisation: the gradient of the convolution, and sums for gamma and beta. */
static void normalisation_gradient(
    const Block *block, const Plan *plan, const float *gradient, const float *output, const float *convolved,
    const float *kept, const float *scale, float *result, float *gamma, float *beta)
{
    int64_t features = block->features;
    float factor = 1.0f / (float)(plan->positions * (features / block->groups));
    float *products = plan->sums, *sums = plan->sums + features;
    for (int64_t first = 0; first < features; first += LANES) {
        vector mean = load(kept + first), inverse = load(kept + features + first), product = {}, sum = {};
        for (int64_t position = 0; position < plan->positions; position++) {
            int64_t place = position * features + first;
            mask off = load(output + place) <= (vector){};
            vector own = (vector)((mask)load(gradient + place) & ~off);
            store(result + place, own);
            product += own * ((load(convolved + place) - mean) * inverse);
            sum += own;
        }
        store(gamma + first, load(gamma + first) + product);
        store(beta + first, load(beta + first) + sum);
        store(products + first, product * load(scale + first));
        store(sums + first, sum * load(scale + first));
    }
    share(block, products, factor, products + 2 * features);
    share(block, sums, factor, sums + 2 * features);
    for (int64_t first = 0; first < features; first += LANES) {
        vector mean = load(kept + first), inverse = load(kept + features + first), own = load(scale + first);
        vector product = load(products + 2 * features + first), sum = load(sums + 2 * features + first);
        for (int64_t position = 0; position < plan->positions; position++) {
            float *to = result + position * features + first;
            vector normalised = (load(convolved + position * features + first) - mean) * inverse;
            store(to, inverse * (own * load(to) - sum - normalised * product));
        }
    }
}

typedef struct {
    const Block *block;
    const float *inputs, *weights, *gamma, *outputs, *convolved, *kept, *gradient;
    float *weight_gradient, *gamma_gradient, *beta_gradient, *input_gradient;
    float *others; /* what the threads after the first have of these sums, weight, gamma and beta each in turn */
} Backward;

static int backward_part(void *given, int64_t begin, int64_t end, int64_t part)
{
    const Backward *task = given;
    Block block = *task->block;
    Plan plan;
    block.batch = end - begin;
    if (plan_for(&block, &plan, 1))
        return 1;
    int64_t features = block.features, size = plan.positions * features, matrix = plan.depth * features;
    int64_t input_size = block.height * block.width * block.channels;
    float *own = part ? task->others + (part - 1) * (matrix + 2 * features) : NULL;
    float *for_weights = own ? own : task->weight_gradient;
    float *for_gamma = own ? own + matrix : task->gamma_gradient;
    float *for_beta = own ? own + matrix + features : task->beta_gradient;
    float *sums = plan.gradients, *maps = plan.gradients + matrix;
    memset(sums, 0, (size_t)matrix * sizeof(float));
    memset(for_gamma, 0, (size_t)features * sizeof(float));
    memset(for_beta, 0, (size_t)features * sizeof(float));
    if (task->input_gradient)
        pack_transposed(&block, &plan, task->weights, plan.weights);
    for (int64_t place = begin; place < end; place += plan.chunk) {
        int64_t count = end - place < plan.chunk ? end - place : plan.chunk, rows = count * plan.positions;
        for (int64_t example = 0; example < count; example++)
            normalisation_gradient(
                &block, &plan, task->gradient + (place + example) * size, task->outputs + (place + example) * size,
                task->convolved + (place + example) * size, task->kept + (place + example) * 2 * features,
                task->gamma, plan.rows + example * size, for_gamma, for_beta);
        bordered(&block, &plan, (float *)task->inputs + place * input_size, plan.maps, count, 1);
        weight_gradients(&block, &plan, rows, sums);
        if (task->input_gradient) {
            memset(maps, 0, (size_t)(count * plan.padded) * sizeof(float));
            input_gradients(&block, &plan, rows, maps);
            bordered(&block, &plan, task->input_gradient + place * input_size, maps, count, 0);
        }
    }
    unpack(&block, &plan, sums, for_weights);
    free(plan.memory);
    return 0;
}

static void add(float *to, const float *from, int64_t count)
{
    for (int64_t index = 0; index < count; index++)
        to[index] += from[index];
}

/* The gradients of `forward` with respect to weights, gamma and beta, and to inputs where they are asked for. */
int backward(
    const Block *block, const float *inputs, const float *weights, const float *gamma, const float *outputs,
    const float *convolved, const float *kept, const float *gradient, float *weight_gradient, float *gamma_gradient,
    float *beta_gradient, float *input_gradient, int64_t threads)
{
    int64_t features = block->features, size = out_positions(block) * features * block->batch;
    int64_t input_size = block->batch * block->height * block->width * block->channels;
    int64_t matrix = features * block->channels * block->kernel_height * block->kernel_width;
    int64_t each = matrix + 2 * features;
    threads = threads_for(block, threads);
    float *others = threads == 1 ? NULL : malloc((size_t)((threads - 1) * each) * sizeof(float));
    int failed = threads > 1 && others == NULL;
    Backward task = {block, inputs, weights, gamma, outputs, convolved, kept, gradient,
                     weight_gradient, gamma_gradient, beta_gradient, input_gradient, others};
    for (int64_t model = 0; model < block->models && !failed; model++) {
        failed = shared(backward_part, &task, block->batch, threads);
        for (int64_t part = 0; part + 1 < threads && !failed; part++) {
            add(task.weight_gradient, others + part * each, matrix);
            add(task.gamma_gradient, others + part * each + matrix, features);
            add(task.beta_gradient, others + part * each + matrix + features, features);
        }
        task.inputs += input_size, task.weights += matrix, task.gamma += features;
        task.outputs += size, task.convolved += size, task.gradient += size;
        task.kept += block->batch * 2 * features;
        task.weight_gradient += matrix, task.gamma_gradient += features, task.beta_gradient += features;
        task.input_gradient = input_gradient ? task.input_gradient + input_size : NULL;
    }
    free(others);
    return failed;
}
