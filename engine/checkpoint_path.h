/* Where a checkpoint's files are, in the layouts that nanochat writes and that models are published in:
 *
 *   DIR/model_000650.pt, meta_000650.json, tokenizer.pkl              flat
 *   BASE/chatsft_checkpoints/d20/model_000650.pt, meta_000650.json    nanochat's base directory, or any part
 * of the way BASE/tokenizer/tokenizer.pkl
 */
#ifndef COP_CHECKPOINT_PATH_H
#define COP_CHECKPOINT_PATH_H

#include "engine/arch_detect.h"

typedef struct checkpoint_paths {
    char *model, *meta;
    char *tokenizer; /* NULL: none was found */
    int64_t step;
} checkpoint_paths;

/* Find the files of the model at `path`: a directory of one of these layouts, or a model_*.pt file.  What was
 * chosen among several goes to `notes`.  Ends with checkpoint_paths_free(), also after a failure. Errors:
 * COP_ENOTFOUND, COP_EUNSUPPORTED (other formats by name), COP_EIO, COP_ENOMEM. */
cop_status checkpoint_paths_find(checkpoint_paths *p, const char *path, const checkpoint_options *o,
                                 note_list *notes, cop_error *err);
/* Find the files of new weights for a model that is open already: as above, but a file may have any name and
 * no meta file needs to be there (`meta` is then NULL). */
cop_status checkpoint_paths_find_weights(checkpoint_paths *p, const char *path, cop_error *err);
/* Whether a path without symbolic links is that of `directory`, or of something in it. */
bool path_lies_in(const char *path, const char *directory);
/* Put what symbolic links lead to in the place of `model` and `meta`: both must lie in `within`, which has no
 * links itself.  Errors: COP_EINVAL, COP_EIO, COP_ENOTFOUND, COP_ENOMEM. */
cop_status checkpoint_paths_confine(checkpoint_paths *p, const char *within, cop_error *err);
void checkpoint_paths_free(checkpoint_paths *p);

#endif
