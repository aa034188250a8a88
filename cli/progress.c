// SPDX-License-Identifier: Apache-2.0
/// The progress bar: bytes done, speed, time left.
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"

#define FIRST_SECONDS 0.5
#define EVERY_SECONDS 0.1
#define BAR_COLUMNS_MAX 40
#define BAR_COLUMNS_MIN 10

/// One bar at a time.
static struct {
    bool is_off, draws;
    atomic_bool is_shown; ///< read by cli_progress_hide() in other threads
    int columns;
    double begun, drawn;
    uint64_t done, total;
} bar;

void cli_set_progress(bool wanted) { bar.is_off = !wanted; }

static void add_bar(double part, int columns, char *text) {
    char line[BAR_COLUMNS_MAX + 1];
    int filled = (int)(part * columns);
    memset(line, '.', sizeof line);
    memset(line, '#', (size_t)filled);
    snprintf(text, 64, "[%.*s] ", columns, line);
}

/// The bar's text for a terminal of `columns` columns, after `seconds`; parts that do not fit are
/// left out. `text` has at least 256 bytes.
static void progress_text(uint64_t done, uint64_t total, double seconds, int columns, char *text) {
    char have[16], all[16], rate[40] = "", left[32] = "", numbers[64];
    double part = total == 0 ? 1 : (double)done / (double)total;
    if (part > 1) part = 1;
    snprintf(numbers, sizeof numbers, "%3d %%  %s of %s", (int)(part * 100),
             cli_size_text(done, have), cli_size_text(total, all));
    if (seconds > 0) snprintf(rate, sizeof rate, "  %.2f GB/s", (double)done / 1e9 / seconds);
    double wait = part > 0 ? seconds / part - seconds : 0;
    if (part > 0 && part < 1 && wait < 360000)
        snprintf(left, sizeof left, "  %d:%02d left", (int)(wait / 60), (int)wait % 60);
    int room = columns - 1 - (int)strlen(numbers);
    text[0] = '\0';
    if (room >= (int)(strlen(rate) + strlen(left)) + BAR_COLUMNS_MIN + 3) {
        int width = room - (int)(strlen(rate) + strlen(left)) - 3;
        add_bar(part, width < BAR_COLUMNS_MAX ? width : BAR_COLUMNS_MAX, text);
    }
    size_t used = strlen(text);
    if (room < (int)strlen(rate)) rate[0] = '\0';
    if (room < (int)(strlen(rate) + strlen(left))) left[0] = '\0';
    snprintf(text + used, 256 - used, "%s%s%s", numbers, rate, left);
    if ((int)strlen(text) >= columns && columns > 0) text[columns - 1] = '\0';
}

static void draw(double now) {
    char text[256];
    progress_text(bar.done, bar.total, now - bar.begun, bar.columns, text);
    fprintf(stderr, "\r%s\x1b[K", text);
    fflush(stderr);
    bar.is_shown = true;
    bar.drawn = now;
}

static int show_progress(void *context, uint64_t bytes_done, uint64_t bytes_total,
                         size_t tensors_done, size_t tensors_total) {
    (void)context, (void)tensors_done, (void)tensors_total;
    bar.done = bytes_done;
    bar.total = bytes_total;
    double now = cli_seconds_now();
    if (now - (bar.is_shown ? bar.drawn : bar.begun) >=
        (bar.is_shown ? EVERY_SECONDS : FIRST_SECONDS))
        draw(now);
    return 0;
}

fst_progress_callback cli_progress_begin(void) {
    bar.columns = cli_terminal_columns(STDERR_FILENO);
    bar.is_shown = false;
    bar.begun = bar.drawn = cli_seconds_now();
    bar.done = bar.total = 0;
    bar.draws = bar.columns > 0 && !bar.is_off && !cli_wants_json() && !cli_terminal_is_dumb();
    return bar.draws ? show_progress : NULL;
}

/// The signal that requested the end of a save; 0: none.
static volatile sig_atomic_t caught_signal;

static void on_signal(int number) { caught_signal = number; }

int cli_caught_signal(void) { return caught_signal; }

static int save_progress(void *context, uint64_t bytes_done, uint64_t bytes_total,
                         size_t tensors_done, size_t tensors_total) {
    if (caught_signal != 0) return 1;
    if (!bar.draws) return 0;
    return show_progress(context, bytes_done, bytes_total, tensors_done, tensors_total);
}

fst_progress_callback cli_save_begin(void) {
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    // Only the first signal is handled. A second one ends the process without cleanup.
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND}, old;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (sigaction(numbers[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
            (void)sigaction(numbers[i], &action, NULL);
    (void)cli_progress_begin();
    return save_progress;
}

void cli_progress_hide(void) {
    if (bar.is_shown) fprintf(stderr, "\r\x1b[K");
}

void cli_progress_end(bool good) {
    if (!bar.is_shown) return;
    bar.done = bar.total;
    if (good)
        draw(cli_seconds_now());
    else
        fprintf(stderr, "\r\x1b[K");
    if (good) fprintf(stderr, "\n");
    bar.is_shown = false;
}
