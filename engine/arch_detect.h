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

#endif
