/* The loss and its gradients by their formulas, in double and with all logits in memory: what a rig must
 * give. For finite logits and small problems. */
#ifndef TESTS_FAULTS_ORACLE_H
#define TESTS_FAULTS_ORACLE_H

#include "harness.h"

typedef struct oracle {
    double loss;                                     /* reduced; under LL_REDUCTION_NONE the sum */
    double *row_loss, *nll, *lse, *entropy, *z_loss; /* [n] */
    double *dr;                                      /* [n, v], gradient of the raw logits */
    double *grad_x, *grad_w, *grad_bias;             /* [n, d], [v, d], [v] */
} oracle;

oracle *oracle_of(const rig *r);
void oracle_free(oracle *o);
/* Every result that the rig holds: `rel` of the value for the losses (and as much absolutely), `rel` of
 * the Frobenius norm over each gradient and 10 rel of its largest element for each element. */
void oracle_check(const oracle *o, const rig *r, double rel);

#endif
