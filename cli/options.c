// SPDX-License-Identifier: Apache-2.0
/// Parses command lines and prints help and completions.
#include "options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fastsafetensors/remote.h>

#include "standard_input.h"

enum { KEY_HELP = -1, KEY_JSON = -2, KEY_QUIET_BAR = -3, KEY_CACHE = -4, KEY_OFFLINE = -5 };

const char *const cli_dtype_words[] = {
    "F64",         "F32",         "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0",
    "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4",  "I64",  "I32",     "I16",     "I8",
    "U64",         "U32",         "U16", "U8",   NULL};

/// Options shared by several commands. Flags of the command select them.
static const cli_option help_option = {KEY_HELP, "help", NULL, NULL, "print this help", 0};
static const cli_option json_option = {
    KEY_JSON, "json", NULL, NULL, "print answers and errors as JSON", 0};
static const cli_option bar_option = {KEY_QUIET_BAR, "no-progress",          NULL,
                                      NULL,          "show no progress bar", 0};

static const cli_option cache_option = {
    KEY_CACHE,
    "cache-dir",
    "FOLDER",
    NULL,
    "cache remote files in FOLDER; auto: the default folder; off: no cache",
    0};

static const cli_option offline_option = {
    KEY_OFFLINE,
    "offline",
    NULL,
    NULL,
    "use no network; URLs are served from the cache folder only",
    0};

static const cli_option *const common_options[] = {&cache_option, &offline_option, &json_option,
                                                   &bar_option, &help_option};
enum { COMMON_COUNT = sizeof common_options / sizeof *common_options };

static bool has_common(const cli_command *command, const cli_option *option) {
    bool is_remote = option == &cache_option || option == &offline_option;
    return (!is_remote || command->has_cache) && (option != &json_option || command->has_json) &&
           (option != &bar_option || command->has_progress);
}

/// Option `index` of a command: its own ones first, then the shared ones; NULL after the last.
static const cli_option *option_at(const cli_command *command, size_t index) {
    size_t own = 0;
    const cli_option *option = command->options;
    for (; option != NULL && option->name != NULL; option++)
        if ((option->of == 0 || (option->of & command->bit) != 0) && own++ == index) return option;
    for (size_t i = 0; i < COMMON_COUNT; i++)
        if (has_common(command, common_options[i]) && own++ == index) return common_options[i];
    return NULL;
}

static bool is_common(const cli_option *option) {
    for (size_t i = 0; i < COMMON_COUNT; i++)
        if (option == common_options[i]) return true;
    return false;
}

const cli_command *cli_command_find(const char *name) {
    for (size_t i = 0; cli_commands[i] != NULL; i++)
        if (strcmp(cli_commands[i]->name, name) == 0) return cli_commands[i];
    return NULL;
}

/// Prints `text` wrapped at 78 columns with an indent. The caller has indented the first line.
static void print_wrapped(const char *text, int indent) {
    int column = indent;
    while (*text != '\0') {
        int size = (int)strcspn(text, " ");
        if (column > indent && column + 1 + size > 78) {
            printf("\n%*s", indent, "");
            column = indent;
        }
        column += printf("%s%.*s", column > indent ? " " : "", size, text);
        text += size;
        text += strspn(text, " ");
    }
    printf("\n");
}

static void print_words(const cli_option *option) {
    char text[256] = "one of ";
    for (size_t i = 0; option->words[i] != NULL; i++) {
        size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "%s%s", i > 0 ? ", " : "", option->words[i]);
    }
    printf("%*s", 22, "");
    print_wrapped(text, 22);
}

static void print_option(const cli_option *option) {
    int used = printf("  --%s%s%s", option->name,
                      option->value == NULL || option->value[0] == '[' ? "" : " ",
                      option->value == NULL ? "" : option->value);
    printf("%*s", used < 21 ? 22 - used : 1, "");
    print_wrapped(option->help, 22);
    if (option->words != NULL) print_words(option);
}

void cli_print_common_options(void) {
    printf("common options, of the commands whose help lists them:\n");
    for (size_t i = 0; i < COMMON_COUNT; i++) print_option(common_options[i]);
}

void cli_print_help(const cli_command *command) {
    printf("usage: fastsafetensors %s [OPTIONS] %s\n\n%s\n\n", command->name, command->operands,
           command->about);
    const cli_option *option;
    size_t count = 0;
    for (; (option = option_at(command, count)) != NULL && !is_common(option); count++)
        print_option(option);
    printf("%scommon options (see 'fastsafetensors help'):", count > 0 ? "\n" : "");
    for (; (option = option_at(command, count)) != NULL; count++) printf(" --%s", option->name);
    printf("\n");
    if (command->examples != NULL) printf("\nexamples:\n%s", command->examples);
}

// ---- parsing ----

static size_t count_differences(const char *a, const char *b) {
    // Levenshtein distance, computed row by row. Names are short, so a fixed row is enough.
    size_t row[64], size = strlen(b);
    if (size >= 63) return 99;
    for (size_t j = 0; j <= size; j++) row[j] = j;
    for (size_t i = 1; a[i - 1] != '\0'; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= size; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[size];
}

const char *cli_nearest(const char *word, const char *const *names, size_t count) {
    const char *nearest = NULL;
    size_t fewest = 3; // at most two differences, otherwise it is another word
    for (size_t i = 0; i < count; i++) {
        size_t differences = count_differences(word, names[i]);
        if (differences < fewest && differences < strlen(word)) {
            fewest = differences;
            nearest = names[i];
        }
    }
    return nearest;
}

static int refuse_option(const cli_command *command, const char *word, size_t size) {
    const char *names[40];
    char given[64];
    size_t count = 0;
    const cli_option *option;
    snprintf(given, sizeof given, "%.*s", (int)size, word);
    for (; count < 40 && (option = option_at(command, count)) != NULL; count++)
        names[count] = option->name;
    const char *nearest = cli_nearest(given, names, count);
    if (nearest != NULL)
        return cli_usage(command->name, "%s has no option '--%s'. Did you mean '--%s'?",
                         command->name, given, nearest);
    return cli_usage(command->name, "%s has no option '--%s'", command->name, given);
}

/// The option with that name, or the only one that starts with it.
static const cli_option *find_option(const cli_command *command, const char *word, size_t size) {
    const cli_option *found = NULL, *option;
    for (size_t i = 0; (option = option_at(command, i)) != NULL; i++) {
        if (strncmp(option->name, word, size) != 0) continue;
        if (strlen(option->name) == size) return option;
        if (found != NULL) return NULL;
        found = option;
    }
    return size > 0 ? found : NULL;
}

/// Sets an option for remote files opened later. fst_remote_configure() replaces all settings, so
/// earlier ones are kept here. A cache folder given by the user must be usable.
static int set_remote(const char *cache_dir, bool offline) {
    static fst_remote_options remote = {.struct_size = sizeof remote};
    fst_error error;
    if (cache_dir != NULL) {
        remote.cache_dir = cache_dir;
        remote.cache_required = strcmp(cache_dir, "off") != 0;
    }
    if (offline) remote.offline = 1;
    return fst_remote_configure(&remote, &error) == FST_OK ? EXIT_OK : cli_fail(&error);
}

static int take_option(const cli_command *command, const cli_option *option, const char *text,
                       void *request) {
    cli_value value = {text, 0};
    switch (option->key) {
    case KEY_JSON: cli_set_json(true); return EXIT_OK;
    case KEY_QUIET_BAR: cli_set_progress(false); return EXIT_OK;
    case KEY_CACHE: return set_remote(text, false);
    case KEY_OFFLINE: return set_remote(NULL, true);
    default: break;
    }
    if (option->words == cli_dtype_words) {
        value.word = cli_find_dtype(text);
        if (value.word < 0) // the list is long: refer to the help
            return cli_usage(command->name,
                             "unknown dtype '%s'; expected one of: F32, F16, BF16, F8_E4M3, ...; "
                             "float32, bfloat16, ... are also accepted",
                             text);
    } else if (option->words != NULL && (value.word = cli_find_word(text, option->words)) < 0) {
        char words[200] = "";
        for (size_t i = 0; option->words[i] != NULL; i++) {
            size_t used = strlen(words);
            snprintf(words + used, sizeof words - used, "%s%s", i > 0 ? ", " : "",
                     option->words[i]);
        }
        return cli_usage(command->name, "unknown value '%s' of --%s; expected one of: %s", text,
                         option->name, words);
    }
    return command->take(request, option->key, value);
}

/// The last option that was given without its optional value, for a hint.
static const cli_option *without_value;

/// Parses the option at words[*at], and its value if that is the next word.
static int parse_option(const cli_command *command, char **words, int *at, void *request,
                        bool *help) {
    const char *word = words[*at];
    bool is_short = word[1] != '-';
    const char *name = is_short ? (strcmp(word, "-h") == 0   ? "help"
                                   : strcmp(word, "-q") == 0 ? "quiet"
                                                             : "")
                                : word + 2;
    size_t size = strcspn(name, "=");
    const cli_option *option = find_option(command, name, size);
    if (option == NULL) {
        if (is_short) return cli_usage(command->name, "unknown option '%s'", word);
        return refuse_option(command, name, size);
    }
    if (option->key == KEY_HELP) {
        *help = true;
        return EXIT_OK;
    }
    const char *text = name[size] == '=' ? name + size + 1 : NULL;
    if (option->value == NULL && text != NULL)
        return cli_usage(command->name, "--%s does not take a value", option->name);
    // "[=...]": an optional value defaults to the first of its words, or to NULL without any.
    bool is_optional = option->value != NULL && option->value[0] == '[';
    if (is_optional && text == NULL) without_value = option;
    if (is_optional && text == NULL && option->words != NULL) text = option->words[0];
    if (option->value != NULL && !is_optional && text == NULL && (text = words[++*at]) == NULL)
        return cli_usage(command->name, "--%s needs a value: %s", option->name, option->value);
    return take_option(command, option, text, request);
}

static int take_inputs(const cli_command *command, const void *request,
                       const cli_operands *operands) {
    input_part part = command->part == NULL ? INPUT_ALL : command->part(request);
    int count = operands->count, code = EXIT_OK;
    if (command->inputs == INPUTS_NONE && count > 0 && strcmp(operands->words[0], "-") == 0)
        return cli_usage(command->name, "%s cannot read standard input", command->name);
    if (command->inputs == INPUTS_NONE) return EXIT_OK;
    if (command->inputs == INPUTS_ALL_BUT_LAST) count--;
    if (command->inputs == INPUTS_FIRST && count > 1) count = 1;
    for (int i = 0; i < count; i++)
        if (operands->words[i][0] == '\0')
            return cli_usage(command->name, "the path of a model is empty");
    for (int i = 0; i < count && code == EXIT_OK; i++)
        code = cli_take_input(&operands->words[i], part);
    return code;
}

static int check_operands(const cli_command *command, const void *request,
                          const cli_operands *operands) {
    int count = operands->count;
    if (count >= command->operand_min && count <= command->operand_max)
        return take_inputs(command, request, operands);
    if (count > command->operand_max && without_value != NULL)
        return cli_usage(command->name,
                         "too many arguments (%d): %s takes %s. A value of --%s follows a '=': "
                         "--%s%s",
                         count, command->name, command->operands, without_value->name,
                         without_value->name, without_value->value);
    if (count > command->operand_max)
        return cli_usage(command->name, "too many arguments (%d): %s takes %s", count,
                         command->name, command->operands);
    return cli_usage(command->name, "expected %s", command->operands);
}

int cli_parse(const cli_command *command, char **argv, void *request, cli_operands *operands) {
    *operands = (cli_operands){.words = argv + 1};
    bool help = false, options_ended = false;
    for (int i = 1; argv[i] != NULL; i++) // so that errors in earlier words are printed as JSON
        if (command->has_json && strcmp(argv[i], "--json") == 0) cli_set_json(true);
    // Operands move to the start of argv while options are parsed.
    for (int i = 1; argv[i] != NULL; i++) {
        if (!options_ended && strcmp(argv[i], "--") == 0) {
            options_ended = true;
        } else if (options_ended || argv[i][0] != '-' || argv[i][1] == '\0') {
            operands->words[operands->count++] = argv[i];
        } else {
            int code = parse_option(command, argv, &i, request, &help);
            if (code != EXIT_OK) return code;
        }
    }
    if (help) {
        cli_print_help(command);
        operands->is_answered = true;
        return EXIT_OK;
    }
    return check_operands(command, request, operands);
}

// ---- completion ----

static void print_matching(const char *prefix, const char *begin, const char *word) {
    size_t size = strlen(prefix);
    if (strncmp(begin, prefix, strlen(begin) < size ? strlen(begin) : size) == 0 &&
        (strlen(begin) >= size || strncmp(word, prefix + strlen(begin), size - strlen(begin)) == 0))
        printf("%s%s\n", begin, word);
}

static void complete_value(const cli_option *option, const char *begin, const char *current) {
    static const char *const files[] = {"FILE", "[=FILE]", "PATH", "TARGET", "FOLDER"};
    for (size_t i = 0; option->words != NULL && option->words[i] != NULL; i++)
        print_matching(current, begin, option->words[i]);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        if (option->words == NULL && strcmp(option->value, files[i]) == 0) printf(":files\n");
}

/// Completes an operand. A command with fixed words expects one of them first, and files after it.
static void complete_operand(const cli_command *command, char **words, int count) {
    const char *current = words[count - 1];
    bool has_word = command->operand_words == NULL;
    for (int i = 1; i + 1 < count && command->operand_max > 1 && !has_word; i++)
        has_word = cli_find_word(words[i], command->operand_words) >= 0;
    if (has_word) printf(":files\n");
    for (size_t i = 0; !has_word && command->operand_words[i] != NULL; i++)
        print_matching(current, "", command->operand_words[i]);
}

int cli_complete(char **words, int count) {
    const char *current = count > 0 ? words[count - 1] : "";
    bool names_command = count <= 1 || (count == 2 && strcmp(words[0], "help") == 0);
    for (size_t i = 0; names_command && cli_commands[i] != NULL; i++)
        print_matching(current, "", cli_commands[i]->name);
    if (names_command) {
        for (int i = 0; count <= 1 && i < 3; i++)
            print_matching(current, "", (const char *[]){"help", "--help", "--version"}[i]);
        if (count <= 1) printf(":files\n");
        return EXIT_OK;
    }
    const cli_command *command = cli_command_find(words[0]);
    if (command == NULL) return EXIT_OK;
    const char *previous = words[count - 2], *equal = strchr(current, '=');
    const cli_option *option = strncmp(previous, "--", 2) == 0 && strchr(previous, '=') == NULL
                                   ? find_option(command, previous + 2, strlen(previous + 2))
                                   : NULL;
    if (option != NULL && option->value != NULL && option->value[0] != '[') {
        complete_value(option, "", current);
    } else if (strncmp(current, "--", 2) == 0 && equal != NULL) {
        char begin[64];
        option = find_option(command, current + 2, (size_t)(equal - current) - 2);
        snprintf(begin, sizeof begin, "%.*s", (int)(equal - current) + 1, current);
        if (option != NULL && option->value != NULL) complete_value(option, begin, current);
    } else if (current[0] == '-') {
        char name[64];
        for (size_t i = 0; (option = option_at(command, i)) != NULL; i++) {
            snprintf(name, sizeof name, "--%s", option->name);
            print_matching(current, "", name);
        }
    } else {
        complete_operand(command, words, count);
    }
    return EXIT_OK;
}
