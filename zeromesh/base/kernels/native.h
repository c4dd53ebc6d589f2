// What Python and the kernels tell each other. zeromesh/base/kernels/native.py and update.py have the same layouts.

#include <stdint.h>

#define INTERFACE 8

enum number { NOTHING, FLOAT32, BFLOAT16, FLOAT16, FLOAT64 };
enum rule { ADAM, SGD, LION, ADAGRAD };

// A rule with the hyperparameters of a group at a step. Those that a rule does not have are not read.
struct row {
    int32_t rule;
    int32_t first;         // SGD: the momentum begins as the gradient
    int32_t nesterov;      // SGD
    int32_t momentous;     // SGD: there is a momentum
    float scale;           // what gradients are multiplied with: unscaling, clipping, and -1 to maximize
    float weight_decay;    // times the master, added to the gradient; not done if 0
    float decay;           // the master is multiplied with it; 1 if decay is not decoupled
    float step;            // minus the step size
    float weight1;         // of the gradient in the first moment; of the momentum in Lion's direction
    float beta2;           // what stays of the second moment, or of SGD's momentum
    float weight2;         // of the gradient in the second moment, in SGD's momentum and in Lion's
    float root;            // Adam: the root of the second bias correction
    float eps;
    uint32_t salt;         // of the step, in the random bits that round states to bf16
};

// Elements that lie together. What is written may be what is read, and is otherwise apart from all else.
struct piece {
    const void *gradient;
    void *parameter;       // where the new parameter goes as it is computed with, or null
    const void *read[3];   // master and up to two states; null where the rule has none
    void *write[3];
    const uint16_t *remainder;  // the lower halves of the master, whose upper ones read[0] then has; or null
    uint16_t *new_remainder;
    int64_t elements;
    int32_t gradient_type, parameter_type;
    int32_t row;
    int32_t narrow;        // which states are bf16, both read and written: 1 for the first, 2 for the second, 3 for both
};

// Buffers of one type that are added in their order. Each sum is rounded to the type of `out`, which may be one of them.
struct sum {
    const void *const *parts;
    void *out;
    int32_t count, type, out_type;
    int32_t add;  // the whole sum is added to what `out` holds
};

static inline int64_t bytes_of(int32_t type) { return type == FLOAT64 ? 8 : type == FLOAT32 ? 4 : 2; }

void zeromesh_sum(int32_t set, const struct sum *sum, int64_t elements);
