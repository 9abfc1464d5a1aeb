/* Reading ahead. */
#include "worker/line_reader.h"

#include <errno.h>
#include <inttypes.h>
#include <semaphore.h>
#include <string.h>
#include <time.h>

#include "worker/post.h"

#define MOST_READ_BYTES ((size_t)128 << 20) /* of lines that are not finished yet */

struct line_reader {
    line_reader_options o;
    input_file *in;
    queue *lines;
    run_state *run;
    pthread_t thread;
    sem_t room;                         /* jobs that may still be put */
    line_job *first_known, *last_known; /* lines that are not put before all known ones are the same */
    uint64_t order;
    size_t n_held; /* of o.held, so many have had their turn */
};

static void put(line_reader *r, line_job *j) {
    queue_item *item = &j->item;
    queue_put(r->lines, &item);
}

/* Wait until there is room for a job, by number and by bytes; alone it always has it. */
static void wait_for_room(line_reader *r) {
    while (sem_wait(&r->room) != 0 && errno == EINTR) continue;
    while (atomic_load(&r->run->read_bytes) > MOST_READ_BYTES && !run_stopped(r->run))
        nanosleep(&(struct timespec){0, 5000000}, NULL);
}

/* Takes the job. */
static void pass_on(line_reader *r, line_job *j) {
    j->n_read_bytes = sizeof *j + j->n_id + j->input.n + j->record.n + j->tokens.n * sizeof *j->tokens.ids;
    j->n_bytes = j->n_read_bytes;
    wait_for_room(r);
    atomic_fetch_add(&r->run->read_bytes, j->n_read_bytes);
    put(r, j);
}

static void keep_known(line_reader *r, line_job *j) {
    if (r->last_known)
        r->last_known->item.next = &j->item;
    else
        r->first_known = j;
    r->last_known = j;
}

static line_job *take_known(line_reader *r) {
    line_job *j = r->first_known;
    if (!j) return NULL;
    r->first_known = (line_job *)j->item.next;
    if (!r->first_known) r->last_known = NULL;
    j->item.next = NULL;
    return j;
}

/* Lines that an earlier run read must be the same; the check comes with the last of them. */
static cop_status check_known(const line_reader *r, bool ended, cop_error *err) {
    uint64_t n = input_lines(r->in);
    char digest[INPUT_DIGEST_CHARS];
    if (r->o.known_lines == 0) return COP_OK;
    if (n != r->o.known_lines && !(ended && n < r->o.known_lines)) return COP_OK;
    input_digest(r->in, digest);
    if (n == r->o.known_lines && !memcmp(digest, r->o.known_digest, sizeof digest)) return COP_OK;
    return cop_fail(err, COP_EINVAL,
                    "the first %" PRIu64 " lines of the input are not those that the output was begun with",
                    r->o.known_lines);
}

/* A line that is this run's to do. */
static bool is_ours(const line_reader *r, const input_line *line) {
    return !line->blank && line->number >= r->o.next_line && line->number % r->o.of == r->o.index;
}

/* The job of a line that an earlier run has finished, or NULL. */
static line_job *take_held(line_reader *r, const input_line *line, cop_status *status, cop_error *err) {
    held_records *h = r->o.held;
    while (h && r->n_held < h->n && h->records[r->n_held].line < line->number) r->n_held++;
    if (!h || r->n_held == h->n || h->records[r->n_held].line > line->number) return NULL;
    line_job *j = mem_zalloc(1, sizeof *j);
    if (!j) {
        *status = cop_fail(err, COP_ENOMEM, "could not keep line %" PRIu64, line->number);
        return NULL;
    }
    held_record *record = &h->records[r->n_held];
    j->line = line->number;
    j->record = (wire_buffer){(uint8_t *)record->bytes, record->n};
    record->bytes = NULL;
    return j;
}

static cop_status take_line(line_reader *r, const input_line *line, cop_error *err) {
    cop_status status = COP_OK;
    line_job *j = take_held(r, line, &status, err);
    if (status != COP_OK) return status;
    if (!j) j = line_job_open(&r->o.rules, line);
    if (!j) return cop_fail(err, COP_ENOMEM, "could not keep line %" PRIu64, line->number);
    if (j->error.status == COP_EFORMAT && !line->terminated && r->o.tells_digest) {
        cop_fail(err, COP_EFORMAT,
                 "the input ends within line %" PRIu64
                 " (from 0), which is no JSON: whoever writes it has not come to its end",
                 line->number);
        line_job_free(j);
        return err->status;
    }
    if (j->error.status != COP_OK && (r->o.strict || !line_error_stays(&j->error))) {
        *err = j->error;
        cop_error_prefix(err, "line %" PRIu64 " (from 0)", line->number);
        line_job_free(j);
        return err->status;
    }
    j->order = r->order++;
    j->n_lines = input_lines(r->in);
    if (r->o.tells_digest) input_digest(r->in, j->digest);
    if (line->number < r->o.known_lines)
        keep_known(r, j);
    else
        pass_on(r, j);
    return COP_OK;
}

static cop_status read_all(line_reader *r, cop_error *err) {
    for (bool more = true; more && !run_stopped(r->run);) {
        input_line line;
        cop_status status = input_next(r->in, &line, &more, err);
        if (status == COP_OK) status = check_known(r, !more, err);
        if (status == COP_OK && more && is_ours(r, &line)) status = take_line(r, &line, err);
        if (status != COP_OK) return status;
        bool checked = input_lines(r->in) == r->o.known_lines;
        for (line_job *j; checked && !run_stopped(r->run) && (j = take_known(r));) pass_on(r, j);
    }
    return COP_OK;
}

static void *run(void *arg) {
    line_reader *r = arg;
    cop_error err = {0};
    if (read_all(r, &err) != COP_OK) run_stop(r->run, &err);
    line_job *end;
    while (!(end = mem_zalloc(1, sizeof *end))) wait_for_memory();
    end->last = true;
    end->n_lines = input_lines(r->in);
    input_digest(r->in, end->digest);
    put(r, end);
    return NULL;
}

cop_status line_reader_open(line_reader **out, const line_reader_options *o, input_file *in, queue *lines,
                            run_state *state, cop_error *err) {
    *out = NULL;
    line_reader *r = mem_zalloc(1, sizeof *r);
    if (!r) return cop_fail(err, COP_ENOMEM, "could not start to read");
    *r = (line_reader){.o = *o, .in = in, .lines = lines, .run = state};
    sem_init(&r->room, 0, LINES_AHEAD);
    int failed = pthread_create(&r->thread, NULL, run, r);
    if (failed) {
        sem_destroy(&r->room);
        mem_free(r);
        return cop_fail(err, COP_EIO, "could not start the reading thread: %s", strerror(failed));
    }
    *out = r;
    return COP_OK;
}

void line_reader_taken(line_reader *r) { sem_post(&r->room); }

void line_reader_close(line_reader *r) {
    if (!r) return;
    sem_post(&r->room); /* a thread that waits for room sees that the run was stopped */
    pthread_join(r->thread, NULL);
    for (line_job *j; (j = take_known(r));) line_job_free(j);
    sem_destroy(&r->room);
    mem_free(r);
}
