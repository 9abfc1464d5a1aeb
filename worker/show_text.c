/* Text on a terminal. */
#include "worker/show_text.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/utf8.h"

/* Cyan and yellow stay apart for those who cannot tell red from green. */
static const char *const colours[SHOW_N_INKS] = {
    [SHOW_PLAIN] = "",          [SHOW_HEAD] = "\x1b[1m",   [SHOW_SAMPLED] = "\x1b[36m",
    [SHOW_FORCED] = "\x1b[33m", [SHOW_ERROR] = "\x1b[31m",
};
#define NO_COLOUR "\x1b[0m"
#define FORCED_BEGINS "⟦"
#define FORCED_ENDS "⟧"

bool show_wants_colour(FILE *out, const char *choice) {
    if (strcmp(choice, "auto") != 0) return !strcmp(choice, "always");
    const char *no = getenv("NO_COLOR"), *term = getenv("TERM");
    return !(no && *no) && term && strcmp(term, "dumb") != 0 && isatty(fileno(out));
}

static bool is_coloured(const show_page *p, show_ink ink) { return p->colour && colours[ink][0]; }

static void begin(const show_page *p, show_ink ink) {
    if (is_coloured(p, ink)) fputs(colours[ink], p->out);
}
static void end(const show_page *p, show_ink ink) {
    if (is_coloured(p, ink)) fputs(NO_COLOUR, p->out);
}

/* With their marks, where there are no colours. */
void show_begin(const show_page *p, show_ink ink) {
    begin(p, ink);
    if (!p->colour && ink == SHOW_FORCED) fputs(FORCED_BEGINS, p->out);
}
void show_end(const show_page *p, show_ink ink) {
    if (!p->colour && ink == SHOW_FORCED) fputs(FORCED_ENDS, p->out);
    end(p, ink);
}

/* C0, DEL, C1; line and paragraph separators; and what turns the writing direction: text could pose as other
 * text. */
static bool is_control(uint32_t c) {
    return c < 0x20 || (c >= 0x7F && c <= 0x9F) || c == 0x61C || c == 0x200E || c == 0x200F ||
           (c >= 0x2028 && c <= 0x202E) || (c >= 0x2066 && c <= 0x2069);
}

static void put_control(FILE *out, uint32_t c) {
    if (c == '\n')
        fputs("\\n", out);
    else if (c == '\t')
        fputs("\\t", out);
    else if (c == '\r')
        fputs("\\r", out);
    else
        fprintf(out, c < 0x100 ? "\\x%02x" : "\\u{%x}", (unsigned)c);
}

void show_text(const show_page *p, show_ink ink, const char *bytes, size_t n, int indent) {
    show_begin(p, ink);
    for (size_t i = 0, len; i < n; i += len) {
        uint32_t code; /* U+FFFD where the bytes are invalid */
        bool valid = utf8_read(bytes + i, n - i, &code, &len);
        if (code == '\n') {
            end(p, ink);
            fprintf(p->out, "\n%*s", indent, "");
            begin(p, ink);
        } else if (valid && code != '\t' && is_control(code)) {
            put_control(p->out, code);
        } else if (valid) {
            fwrite(bytes + i, 1, len, p->out);
        } else {
            fputs(UTF8_REPLACEMENT, p->out);
        }
    }
    show_end(p, ink);
}

void show_quoted(const show_page *p, show_ink ink, const char *bytes, size_t n) {
    show_begin(p, ink);
    putc('"', p->out);
    for (size_t i = 0, len; i < n; i += len) {
        uint32_t code;
        bool valid = utf8_read(bytes + i, n - i, &code, &len);
        for (size_t k = 0; !valid && k < len; k++)
            fprintf(p->out, "\\x%02x", (unsigned)(unsigned char)bytes[i + k]);
        if (valid && is_control(code))
            put_control(p->out, code);
        else if (valid)
            fwrite(bytes + i, 1, len, p->out);
    }
    putc('"', p->out);
    show_end(p, ink);
}
