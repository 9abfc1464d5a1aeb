/* Progress on stderr: the state becomes a view, the view a line, the line is drawn over the last one. */
#include "worker/progress.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "worker/progress_internal.h"

#define REDRAW_SECONDS 0.1
#define PLAIN_SECONDS 30.0
#define SPEED_MEMORY_SECONDS 15.0
#define ETA_MEMORY_SECONDS 300.0 /* lines end in bursts: an ETA from the last seconds would jump */
#define LONGEST_ETA_SECONDS (1000 * 3600.0)

enum { DEFAULT_COLUMNS = 80, BAR_LEAST = 8, BAR_MOST = 30, PART_BYTES = 80 };

/* ---- Numbers. */

/* 1234567 as "1,234,567". */
static void format_count(char text[32], uint64_t n) {
    char digits[24];
    int n_digits = snprintf(digits, sizeof digits, "%" PRIu64, n);
    for (int i = 0; i < n_digits; i++) {
        *text++ = digits[i];
        if (i + 1 < n_digits && (n_digits - i - 1) % 3 == 0) *text++ = ',';
    }
    *text = '\0';
}

static void format_duration(char text[32], double seconds) {
    uint64_t s = (uint64_t)seconds;
    if (s < 3600)
        snprintf(text, 32, "%d:%02d", (int)(s / 60), (int)(s % 60));
    else
        snprintf(text, 32, "%" PRIu64 ":%02d:%02d", s / 3600, (int)(s / 60 % 60), (int)(s % 60));
}

static void format_memory(char text[32], size_t bytes) {
    double mib = (double)bytes / (1 << 20);
    if (mib < 1024)
        snprintf(text, 32, "%.0f MiB", mib);
    else
        snprintf(text, 32, "%.1f GiB", mib / 1024);
}

static double share_done(const progress_state *s) {
    return s->lines >= s->n_lines ? 1 : (double)s->lines / (double)s->n_lines;
}

/* "4,312 of 10,000 lines", or "4,312 lines". */
static void format_lines(char *text, size_t room, const progress_state *s) {
    char lines[32], n_lines[32];
    format_count(lines, s->lines);
    format_count(n_lines, s->n_lines);
    if (s->n_lines > 0)
        snprintf(text, room, "%s of %s lines", lines, n_lines);
    else
        snprintf(text, room, "%s lines", lines);
}

/* ---- A line. */

/* In order of place; the first of DROPPED goes first. */
typedef enum part { WHAT, BAR, PERCENT, LINES, SAMPLES, SPEED, MEMORY, ETA, N_PARTS } part;
static const part DROPPED[] = {MEMORY, SAMPLES, BAR, SPEED, LINES, WHAT, ETA};

/* An empty text is left out. */
typedef struct parts {
    char text[N_PARTS][PART_BYTES];
} parts;

static void make_parts(parts *p, const progress_view *v) {
    char number[32];
    *p = (parts){0};
    snprintf(p->text[WHAT], PART_BYTES, "%s", v->what);
    if (v->now.n_lines > 0) {
        if (v->columns > 0) snprintf(p->text[BAR], PART_BYTES, "[%*s]", BAR_LEAST, "");
        snprintf(p->text[PERCENT], PART_BYTES, "%d %%", (int)(100 * share_done(&v->now)));
    }
    format_lines(p->text[LINES], PART_BYTES, &v->now);
    format_count(number, v->now.samples);
    snprintf(p->text[SAMPLES], PART_BYTES, "%s samples", number);
    if (v->tokens_per_second >= 0) {
        format_count(number, (uint64_t)(v->tokens_per_second + 0.5));
        snprintf(p->text[SPEED], PART_BYTES, "%s tokens/s", number);
    }
    if (v->rss_bytes > 0) format_memory(p->text[MEMORY], v->rss_bytes);
    if (v->now.n_lines > 0 && v->eta_seconds >= 0 && v->eta_seconds < LONGEST_ETA_SECONDS) {
        format_duration(number, v->eta_seconds);
        snprintf(p->text[ETA], PART_BYTES, "ETA %s", number);
    }
}

/* Name, bar and percent stand apart, the others are a list. */
static size_t join_parts(char line[PROGRESS_LINE_BYTES], const parts *p) {
    size_t n = 0;
    int last = -1;
    line[0] = '\0';
    for (int i = 0; i < N_PARTS; i++) {
        if (!p->text[i][0]) continue;
        const char *between = last < 0 ? "" : last <= PERCENT ? "  " : ", ";
        n += (size_t)snprintf(line + n, PROGRESS_LINE_BYTES - n, "%s%s", between, p->text[i]);
        last = i;
    }
    return n;
}

static void draw_bar(char text[PART_BYTES], int inside, double share) {
    int done = (int)(share * inside);
    memset(text + 1, ' ', (size_t)inside);
    memset(text + 1, '=', (size_t)done);
    if (done < inside) text[1 + done] = '>';
    snprintf(text + 1 + inside, 2, "]");
}

void progress_format(char line[PROGRESS_LINE_BYTES], const progress_view *v) {
    parts p;
    make_parts(&p, v);
    size_t n = join_parts(line, &p);
    if (v->columns <= 0) return;
    size_t room = (size_t)v->columns - 1; /* a full line would already wrap on some terminals */
    for (size_t i = 0; n > room && i < sizeof DROPPED / sizeof *DROPPED; i++) {
        p.text[DROPPED[i]][0] = '\0';
        n = join_parts(line, &p);
    }
    if (p.text[BAR][0]) {
        size_t inside = BAR_LEAST + room - n;
        draw_bar(p.text[BAR], inside < BAR_MOST ? (int)inside : BAR_MOST, share_done(&v->now));
        n = join_parts(line, &p);
    }
    if (n > room) line[room] = '\0';
}

void progress_format_end(char line[PROGRESS_LINE_BYTES], const char *what, const progress_state *start,
                         const progress_state *end, double seconds) {
    char lines[PART_BYTES], samples[32], tokens[32], duration[32], speed[32];
    format_lines(lines, sizeof lines, end);
    format_count(samples, end->samples);
    format_count(tokens, end->tokens - start->tokens);
    format_duration(duration, seconds);
    format_count(speed, (uint64_t)((double)(end->tokens - start->tokens) / fmax(seconds, 1e-3) + 0.5));
    snprintf(line, PROGRESS_LINE_BYTES, "%.60s  %s, %s samples%s%s tokens in %s, %s tokens/s", what, lines,
             samples, start->lines > 0 ? "; this run: " : ", ", tokens, duration, speed);
}

/* ---- Speed. */

void progress_rate_add(progress_rate *r, double amount, double seconds) {
    double kept = exp(-seconds / r->memory_seconds);
    r->amount = r->amount * kept + amount;
    r->seconds = r->seconds * kept + seconds;
}

double progress_rate_per_second(const progress_rate *r) {
    return r->seconds >= 1 ? r->amount / r->seconds : -1;
}

/* ---- The process and its terminal. */

static size_t resident_bytes(void) {
    FILE *f = fopen("/proc/self/statm", "re");
    unsigned long pages = 0;
    if (f) {
        if (fscanf(f, "%*u %lu", &pages) != 1) pages = 0;
        fclose(f);
    }
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* One on which a line can be drawn again. */
static bool is_terminal(FILE *out) {
    const char *term = getenv("TERM");
    return isatty(fileno(out)) && term && *term && strcmp(term, "dumb") != 0;
}

static int columns_of(FILE *out) {
    struct winsize size;
    if (ioctl(fileno(out), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return DEFAULT_COLUMNS;
    return size.ws_col;
}

/* ---- A run. */

struct progress {
    FILE *out;
    char *what;
    bool terminal;
    progress_state start, shown; /* shown: when a line was printed last */
    double opened, printed;      /* seconds; printed < 0: nothing yet */
    double measured;             /* when the rates were fed last */
    progress_rate tokens, lines;
    char bar[PROGRESS_LINE_BYTES]; /* on the terminal now; "": none */
};

progress *progress_open_at(FILE *out, const char *what, const progress_state *start, double seconds) {
    progress *p = mem_zalloc(1, sizeof *p);
    char *name = mem_strdup(what);
    if (!p || !name) {
        mem_free(name);
        mem_free(p);
        return NULL;
    }
    *p = (progress){.out = out,
                    .what = name,
                    .terminal = is_terminal(out),
                    .start = *start,
                    .shown = *start,
                    .opened = seconds,
                    .printed = -1,
                    .measured = seconds,
                    .tokens = {.memory_seconds = SPEED_MEMORY_SECONDS},
                    .lines = {.memory_seconds = ETA_MEMORY_SECONDS}};
    return p;
}

progress *progress_open(const char *what, const progress_state *start, bool quiet) {
    return quiet ? NULL : progress_open_at(stderr, what, start, clock_seconds());
}

/* Feed the rates with what came since the last time. */
static void measure(progress *p, const progress_state *now, double seconds) {
    double passed = seconds - p->measured;
    progress_rate_add(&p->tokens, (double)now->tokens - (double)p->shown.tokens, passed);
    progress_rate_add(&p->lines, (double)now->lines - (double)p->shown.lines, passed);
    p->measured = seconds;
    p->shown = *now;
}

static progress_view view_of(const progress *p, const progress_state *now) {
    double lines_per_second = progress_rate_per_second(&p->lines), eta = -1;
    if (lines_per_second > 0 && now->n_lines > now->lines)
        eta = (double)(now->n_lines - now->lines) / lines_per_second;
    return (progress_view){.what = p->what,
                           .now = *now,
                           .tokens_per_second = progress_rate_per_second(&p->tokens),
                           .eta_seconds = eta,
                           .rss_bytes = resident_bytes(),
                           .columns = p->terminal ? columns_of(p->out) : 0};
}

/* One write each, so that other output does not come between. */
static void erase(progress *p) {
    if (p->bar[0]) fputs("\r\x1b[K", p->out);
}

static void draw(progress *p) {
    if (p->bar[0]) fprintf(p->out, "\r\x1b[K%s", p->bar);
}

void progress_update_at(progress *p, const progress_state *now, double seconds) {
    if (!p) return;
    if (p->printed >= 0 && seconds - p->printed < (p->terminal ? REDRAW_SECONDS : PLAIN_SECONDS)) return;
    p->printed = seconds;
    measure(p, now, seconds);
    progress_view v = view_of(p, now);
    progress_format(p->bar, &v);
    if (p->terminal)
        draw(p);
    else
        fprintf(p->out, "%s\n", p->bar);
    fflush(p->out);
}

void progress_update(progress *p, const progress_state *now) { progress_update_at(p, now, clock_seconds()); }

void progress_print(progress *p, const char *line) {
    if (!p) return;
    if (p->terminal) erase(p);
    fprintf(p->out, "%s\n", line);
    if (p->terminal) draw(p);
    fflush(p->out);
}

void progress_close(progress *p, const progress_state *end) {
    if (!p) return;
    char line[PROGRESS_LINE_BYTES];
    if (p->terminal) erase(p);
    progress_format_end(line, p->what, &p->start, end, clock_seconds() - p->opened);
    fprintf(p->out, "%s\n", line);
    fflush(p->out);
    mem_free(p->what);
    mem_free(p);
}
