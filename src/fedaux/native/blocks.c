/* Convolution, group normalisation and ReLU of small maps in one pass, and their gradients.
 *
 * Maps are [examples, positions, channels] in single precision; features are a multiple of LANES. A few examples are
 * worked on at a time, as many as stay in the processor's cache: their maps are copied into a border of zeros, and
 * every product is computed in tiles that stay in registers. Sums are made in the same order every time; what comes
 * out for an example does not depend on the others.
 */

#include <math.h>
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

/* Outputs [models, batch, positions, features] of a block for inputs [models, batch, positions, channels].
 *
 * `convolved`, of the same shape, keeps the convolution for `backward`, and `kept` mean and inverse deviation of each
 * channel, [models, batch, 2, features]. Returns 1 where there is no memory.
 */
int forward(
    const Block *block, const float *inputs, const float *weights, const float *gamma, const float *beta,
    float *outputs, float *convolved, float *kept)
{
    Plan plan;
    if (plan_for(block, &plan, 0))
        return 1;
    int64_t features = block->features, size = plan.positions * features;
    int64_t input_size = block->height * block->width * block->channels;
    for (int64_t model = 0; model < block->models; model++) {
        pack(block, &plan, weights + model * plan.depth * features, plan.weights);
        for (int64_t begin = 0; begin < block->batch; begin += plan.chunk) {
            int64_t count = block->batch - begin < plan.chunk ? block->batch - begin : plan.chunk;
            int64_t place = model * block->batch + begin;
            forward_chunk(
                block, &plan, inputs + place * input_size, gamma + model * features, beta + model * features, count,
                outputs + place * size, convolved + place * size, kept + place * 2 * features);
        }
    }
    free(plan.memory);
    return 0;
}

/* Outputs [models, batch, positions, features] of a chain of blocks, for predictions: a few examples go through all of
 * them before the next ones do. Inputs are [batch, positions, channels] for each model, where `own_inputs`, or for all.
 * `parameters` are weights, gamma and beta of each block in turn, of all models.
 */
int predict(
    const Block *blocks, int64_t count, const float *const *parameters, const float *inputs, int64_t own_inputs,
    float *outputs)
{
    Plan plans[MOST_BLOCKS];
    Block own[MOST_BLOCKS];
    int64_t largest = 1, together, made = 0;
    int failed = count < 1 || count > MOST_BLOCKS;
    for (int64_t index = 0; index < count && !failed; index++) {
        own[index] = blocks[index];
        failed = plan_for(&own[index], &plans[index], 0);
        made += !failed;
        if (!failed && plans[index].positions * own[index].features > largest)
            largest = plans[index].positions * own[index].features;
    }
    together = largest > CHAIN_FLOATS ? 1 : CHAIN_FLOATS / largest;
    float *maps = failed ? NULL : malloc((size_t)(2 * together * largest) * sizeof(float));
    failed = failed || maps == NULL;
    int64_t batch = blocks[0].batch, input_size = blocks[0].height * blocks[0].width * blocks[0].channels;
    for (int64_t model = 0; model < blocks[0].models && !failed; model++) {
        for (int64_t index = 0; index < count; index++)
            pack(
                &own[index], &plans[index],
                parameters[3 * index] + model * plans[index].depth * own[index].features, plans[index].weights);
        for (int64_t begin = 0; begin < batch; begin += together) {
            int64_t examples = batch - begin < together ? batch - begin : together;
            const float *from = inputs + ((own_inputs ? model * batch : 0) + begin) * input_size;
            for (int64_t index = 0; index < count; index++) {
                const Block *block = &own[index];
                const Plan *plan = &plans[index];
                int64_t size = plan->positions * block->features;
                int64_t size_before = block->height * block->width * block->channels;
                float *to = index + 1 == count ? outputs + (model * batch + begin) * size
                                               : maps + (index % 2) * together * largest;
                for (int64_t done = 0; done < examples; done += plan->chunk)
                    forward_chunk(
                        block, plan, from + done * size_before, parameters[3 * index + 1] + model * block->features,
                        parameters[3 * index + 2] + model * block->features,
                        examples - done < plan->chunk ? examples - done : plan->chunk, to + done * size, NULL, NULL);
                from = to;
            }
        }
    }
    free(maps);
    while (made > 0)
        free(plans[--made].memory);
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

/* The gradients of `forward` with respect to weights, gamma and beta, and to inputs where they are asked for. */
int backward(
    const Block *block, const float *inputs, const float *weights, const float *gamma, const float *outputs,
    const float *convolved, const float *kept, const float *gradient, float *weight_gradient, float *gamma_gradient,
    float *beta_gradient, float *input_gradient)
{
    Plan plan;
    if (plan_for(block, &plan, 1))
        return 1;
    int64_t features = block->features, size = plan.positions * features, matrix = plan.depth * features;
    int64_t input_size = block->height * block->width * block->channels;
    float *sums = plan.gradients, *maps = plan.gradients + matrix;
    for (int64_t model = 0; model < block->models; model++) {
        const float *scale = gamma + model * features;
        float *for_gamma = gamma_gradient + model * features, *for_beta = beta_gradient + model * features;
        memset(sums, 0, (size_t)matrix * sizeof(float));
        memset(for_gamma, 0, (size_t)features * sizeof(float));
        memset(for_beta, 0, (size_t)features * sizeof(float));
        if (input_gradient)
            pack_transposed(block, &plan, weights + model * matrix, plan.weights);
        for (int64_t begin = 0; begin < block->batch; begin += plan.chunk) {
            int64_t count = block->batch - begin < plan.chunk ? block->batch - begin : plan.chunk;
            int64_t place = model * block->batch + begin, rows = count * plan.positions;
            for (int64_t example = 0; example < count; example++)
                normalisation_gradient(
                    block, &plan, gradient + (place + example) * size, outputs + (place + example) * size,
                    convolved + (place + example) * size, kept + (place + example) * 2 * features, scale,
                    plan.rows + example * size, for_gamma, for_beta);
            bordered(block, &plan, (float *)inputs + place * input_size, plan.maps, count, 1);
            weight_gradients(block, &plan, rows, sums);
            if (input_gradient) {
                memset(maps, 0, (size_t)(count * plan.padded) * sizeof(float));
                input_gradients(block, &plan, rows, maps);
                bordered(block, &plan, input_gradient + place * input_size, maps, count, 0);
            }
        }
        unpack(block, &plan, sums, weight_gradient + model * matrix);
    }
    free(plan.memory);
    return 0;
}
