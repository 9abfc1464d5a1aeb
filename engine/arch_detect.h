/* Which generation of nanochat a checkpoint is, from the names and shapes of its tensors and its
 * configuration (NANOCHAT.md 1.2 to 1.5). */
#ifndef COP_ARCH_DETECT_H
#define COP_ARCH_DETECT_H

#include "engine/model_config.h"
#include "engine/pt_file.h"

/* Sentences about what had to be assumed. */
enum { MAX_NOTES = 12, NOTE_BYTES = 320 };
typedef struct note_list {
    int n;
    char text[MAX_NOTES][NOTE_BYTES];
} note_list;

/* Add a sentence.  One beyond MAX_NOTES would be a bug of ours. */
void note_add(note_list *l, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Fill in *out; what was assumed goes to `notes`.
 * Errors: COP_EUNSUPPORTED (short-lived generations, mixtures of experts and forks, by name), COP_EFORMAT
 * (tensors that are missing or have another shape than the configuration says), COP_EINVAL (an override). */
cop_status arch_detect(arch *out, const pt_file *f, const model_config *config, const checkpoint_options *o,
                       note_list *notes, cop_error *err);

/* What a generation's arithmetic says once its letter ('A' to 'F') is known, for n_layers of a: rope base and
 * table, QK scale, gate factor, value-embedding layers, backout; and its name. */
void arch_set_generation(arch *a, char generation);

/* Windows by layer from a pattern of S and L, sequence_len and the generation.  short_window: what S sees; 0:
 * as the generation derives it.  True if any layer has a short window. */
bool arch_set_windows(arch *a, const char *pattern, int32_t short_window);

#endif
