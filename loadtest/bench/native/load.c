/* A load client that costs next to nothing: one thread, epoll, one JSON line a moment of the run.
 *
 *   --mode closed   each of C connections sends the next request when the last one is answered
 *   --mode open     Poisson arrivals at R a second, whatever became of those before; timed from the intended start
 *   --mode stream   each of C connections has one stream after another; a chunk's stamp tells its time on the way
 *   --mode hold     C streams are opened and kept; says {"event": "held"} once each has had its first chunk
 *
 * Counts what ends between `warm` and `warm + seconds`, and says {"event": "begin"} at the first, so that its caller
 * can read other meters for the same time. An answer counts only if it is a 200 and whole: by its length or last chunk,
 * and as a stream by exactly as many content chunks as it asked for, the finish reason and [DONE]. Leaves when its
 * standard input is closed.
 */
#include "wire.h"

#include <getopt.h>
#include <math.h>
#include <stdarg.h>

enum { HEAD_ROOM = 8192, STEPS = 128, OCTAVES = 56, KINDS = 8, EVENTS = 512, OPEN_CAP = 4096, READ_SIZE = 1 << 16 };
static const uint64_t OPEN_GRACE_US = 2000000;

/* --- a histogram whose buckets are 1/128 of an octave wide: quantiles are exact to 0.8 % */

typedef struct {
    uint64_t bucket[OCTAVES * STEPS], count, largest;
    double sum;
} histogram;

static void record(histogram *h, uint64_t value) {
    int octave = value < STEPS ? 0 : 57 - __builtin_clzll(value);
    int index = value < STEPS ? (int)value : octave * STEPS + (int)((value >> (octave - 1)) & (STEPS - 1));
    h->bucket[index < OCTAVES * STEPS ? index : OCTAVES * STEPS - 1]++;
    h->count++;
    h->sum += (double)value;
    if (value > h->largest) h->largest = value;
}

static uint64_t quantile(const histogram *h, double q) {
    uint64_t wanted = (uint64_t)ceil(q * (double)h->count), seen = 0;
    for (int i = 0; i < OCTAVES * STEPS; i++)
        if ((seen += h->bucket[i]) >= wanted && seen)
            return i < STEPS ? (uint64_t)i : (uint64_t)(STEPS + i % STEPS) << (i / STEPS - 1);
    return 0;
}

/* --- options and results */

typedef enum { CLOSED, OPEN, STREAM, HOLD } mode;
static const char *const mode_names[] = {"closed", "open", "stream", "hold"};

static struct {
    mode mode;
    int port, connections, body_bytes, chunks, interval_ms;
    double seconds, warm_s, rate_per_s, ramp_s;
    const char *key;
} options = {.connections = 1, .body_bytes = 1024, .chunks = 100, .interval_ms = 20,
             .seconds = 2, .warm_s = 0.5, .rate_per_s = 300, .ramp_s = 0.2, .key = "none"};

static histogram latency, first_token, relay_delay, gap;
static uint64_t requests, chunks_seen, errors, dials, refused_to_queue, bytes_in, bytes_out;
static struct { char text[96]; uint64_t count; } kinds[KINDS];
static int kinds_used;

static uint64_t window_begin, window_end;
static int counted(uint64_t t) { return t >= window_begin && t < window_end; }

static void count_error(const char *format, ...) {
    char text[96];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    errors++;
    for (int i = 0; i < kinds_used; i++)
        if (!strcmp(kinds[i].text, text)) { kinds[i].count++; return; }
    if (kinds_used == KINDS) return;
    snprintf(kinds[kinds_used].text, sizeof text, "%s", text);
    kinds[kinds_used++].count = 1;
}

/* --- connections */

typedef struct connection {
    int fd, online, busy;
    uint64_t started_us, last_chunk_us;
    size_t sent;
    /* The answer so far */
    char head[HEAD_ROOM];
    size_t head_used;
    int in_body, status, chunked, closes, finished, done;
    long body_left;                          /* -1: until the connection ends */
    enum { SIZE_LINE, DATA, DATA_END, TRAILER } part;
    size_t chunk_left;
    char size_line[32];
    int size_used, trailer_used;
    buffer line;
    int content_chunks;
    struct connection *next_free;
} connection;

static int poller, streams_begun;
static buffer request;
static connection *free_connections;

static int streaming(void) { return options.mode == STREAM || options.mode == HOLD; }

static void begin(connection *c, uint64_t started_us);

static void dial(connection *c) {
    struct sockaddr_in address = loopback(options.port);
    c->fd = loopback_socket();
    c->online = 0;
    dials++;
    connect(c->fd, (void *)&address, sizeof address);
    watch(poller, EPOLL_CTL_ADD, c->fd, EPOLLIN | EPOLLOUT, c);
}

static void hang_up(connection *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
    c->online = 0;
}

static void send_request(connection *c) {
    int had_to_wait = c->sent > 0 || !c->online;
    c->online = 1;
    while (c->sent < request.used) {
        ssize_t n = send(c->fd, request.data + c->sent, request.used - c->sent, MSG_NOSIGNAL);
        if (n < 0) break; /* a broken connection shows when it is read */
        c->sent += (size_t)n;
        if (counted(now_us())) bytes_out += (uint64_t)n;
    }
    int incomplete = c->sent < request.used;
    if (had_to_wait || incomplete) watch(poller, EPOLL_CTL_MOD, c->fd, EPOLLIN | (incomplete ? EPOLLOUT : 0u), c);
}

static void begin(connection *c, uint64_t started_us) {
    c->busy = 1;
    c->started_us = started_us;
    c->last_chunk_us = 0;
    c->sent = c->head_used = c->chunk_left = c->line.used = 0;
    c->in_body = c->status = c->chunked = c->closes = c->finished = c->done = 0;
    c->size_used = c->trailer_used = c->content_chunks = 0;
    c->part = SIZE_LINE;
    c->body_left = -1;
    if (c->fd < 0) dial(c);
    else if (c->online) send_request(c);
}

/* The request is over; `why` is NULL where its answer was right. */
static void end(connection *c, const char *why) {
    uint64_t now = now_us();
    char status[32];
    if (!why && c->status != 200) snprintf(status, sizeof status, "status %d", c->status), why = status;
    if (!why && streaming() && !(c->finished && c->done)) why = "stream without finish reason or [DONE]";
    if (!why && streaming() && c->content_chunks != options.chunks) why = "stream with lost or doubled chunks";
    if (why) count_error("%s", why);
    else if (counted(now)) {
        requests++;
        record(&latency, now - c->started_us);
    }
    c->busy = 0;
    if (why || c->closes) hang_up(c);
    if (options.mode == OPEN) {
        c->next_free = free_connections;
        free_connections = c;
    } else if (options.mode != HOLD && now < window_end) {
        if (why) usleep(500); /* a target that refuses everything is not to be hammered */
        begin(c, now_us());
    }
}

/* --- answers */

static void take_line(connection *c, const char *line, size_t length) {
    if (length < 6 || memcmp(line, "data:", 5)) return;
    if (memmem(line, length, "[DONE]", 6)) { c->done = 1; return; }
    if (memmem(line, length, "\"finish_reason\":\"", 17) || memmem(line, length, "\"finish_reason\": \"", 18))
        c->finished = 1;
    const char *stamp = memmem(line, length, STAMP, sizeof STAMP - 1);
    if (!stamp) return;
    uint64_t now = now_us(), written = strtoull(stamp + 2, NULL, 10);
    if (!c->content_chunks++) {
        streams_begun++;
        if (counted(now)) record(&first_token, now - c->started_us);
    }
    if (counted(now)) {
        chunks_seen++;
        record(&relay_delay, now > written ? now - written : 0);
        if (c->last_chunk_us) record(&gap, now - c->last_chunk_us);
    }
    c->last_chunk_us = now;
}

static void take_body(connection *c, const char *data, size_t length) {
    if (!streaming()) return;
    for (const char *stop; length; data = stop + 1) {
        stop = memchr(data, '\n', length);
        size_t n = stop ? (size_t)(stop - data) : length;
        if (!stop) { buffer_add(&c->line, data, n); return; }
        if (c->line.used) {
            buffer_add(&c->line, data, n + 1);
            take_line(c, c->line.data, c->line.used);
            c->line.used = 0;
        } else take_line(c, data, n);
        length -= n + 1;
    }
}

/* Returns 1 where the last chunk has come. */
static int take_chunked(connection *c, const char *data, size_t length) {
    while (length) {
        if (c->part == DATA) {
            size_t n = c->chunk_left < length ? c->chunk_left : length;
            take_body(c, data, n);
            data += n, length -= n;
            if (!(c->chunk_left -= n)) c->part = DATA_END;
            continue;
        }
        char byte = *data++;
        length--;
        if (c->part == DATA_END) {
            if (byte == '\n') c->part = SIZE_LINE, c->size_used = 0;
        } else if (c->part == TRAILER) {
            if (byte == '\n' && !c->trailer_used) return 1;
            c->trailer_used = byte == '\n' ? 0 : c->trailer_used + (byte != '\r');
        } else if (byte != '\n') {
            if (c->size_used < (int)sizeof c->size_line - 1) c->size_line[c->size_used++] = byte;
        } else {
            c->size_line[c->size_used] = 0;
            c->chunk_left = strtoul(c->size_line, NULL, 16);
            c->part = c->chunk_left ? DATA : TRAILER;
        }
    }
    return 0;
}

/* Takes the head out of `data`; returns how many bytes it used, or -1 where the head is absurd. */
static ssize_t take_head(connection *c, const char *data, size_t length) {
    size_t before = c->head_used, n = length < HEAD_ROOM - before ? length : HEAD_ROOM - before;
    memcpy(c->head + before, data, n);
    c->head_used += n;
    const char *stop = memmem(c->head, c->head_used, "\r\n\r\n", 4), *value;
    if (!stop) return c->head_used == HEAD_ROOM ? -1 : (ssize_t)n;
    size_t head_length = (size_t)(stop - c->head) + 4;
    c->status = c->head_used > 12 ? atoi(c->head + 9) : 0;
    c->in_body = 1;
    if ((value = header(c->head, head_length, "transfer-encoding:"))) c->chunked = 1;
    else if ((value = header(c->head, head_length, "content-length:"))) c->body_left = strtol(value, NULL, 10);
    if ((value = header(c->head, head_length, "connection:")) && !strncasecmp(value, "close", 5)) c->closes = 1;
    return (ssize_t)(head_length - before);
}

static void take(connection *c, const char *data, size_t length) {
    if (!c->in_body) {
        ssize_t n = take_head(c, data, length);
        if (n < 0) return end(c, "head above 8 KB");
        data += n, length -= (size_t)n;
    }
    if (!c->in_body) return;
    if (c->chunked) {
        if (take_chunked(c, data, length)) end(c, NULL);
    } else {
        take_body(c, data, length);
        if (c->body_left >= 0 && (c->body_left -= (long)length) <= 0) end(c, NULL);
    }
}

static void read_answer(connection *c) {
    static char data[READ_SIZE];
    for (int fd = c->fd; c->fd == fd;) { /* the next request may have a connection of its own */
        ssize_t n = recv(c->fd, data, sizeof data, 0);
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0) {
            int whole = n == 0 && c->busy && c->in_body && !c->chunked && c->body_left < 0;
            hang_up(c);
            if (whole) end(c, NULL);
            else if (c->busy) end(c, c->head_used ? "ended inside an answer" : "ended before an answer");
            return;
        }
        if (counted(now_us())) bytes_in += (uint64_t)n;
        if (!c->busy) { hang_up(c); return; } /* bytes that nobody asked for */
        take(c, data, (size_t)n);
        if ((size_t)n < sizeof data) return;
    }
}

/* --- the run */

static void build_request(void) {
    static const char words[] = "heterogeneous cards share one room and one model ";
    buffer body = {0};
    char text[512];
    int n = snprintf(text, sizeof text,
                     "{\"model\":\"bench-model\",%s\"max_tokens\":%d,\"seed\":%d,\"temperature\":0.7,"
                     "\"messages\":[{\"role\":\"user\",\"content\":\"",
                     streaming() ? "\"stream\":true," : "", options.chunks, options.interval_ms);
    buffer_add(&body, text, (size_t)n);
    while (body.used + 4 < (size_t)options.body_bytes)
        buffer_add(&body, &words[(body.used - (size_t)n) % (sizeof words - 1)], 1);
    buffer_add(&body, "\"}]}", 4);
    n = snprintf(text, sizeof text,
                 "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nuser-agent: headrace-bench\r\n"
                 "accept: */*\r\ncontent-type: application/json\r\nauthorization: Bearer %s\r\n"
                 "content-length: %zu\r\n\r\n",
                 options.port, options.key, body.used);
    buffer_add(&request, text, (size_t)n);
    buffer_add(&request, body.data, body.used);
    buffer_free(&body);
}

static void print_count(const char *name, uint64_t count) { printf(", \"%s\": %llu", name, (unsigned long long)count); }

static void print_histogram(const char *name, const histogram *h) {
    printf(", \"%s\": {\"count\": %llu", name, (unsigned long long)h->count);
    if (h->count) {
        printf(", \"mean\": %.1f", h->sum / (double)h->count);
        print_count("p50", quantile(h, .5));
        print_count("p90", quantile(h, .9));
        print_count("p99", quantile(h, .99));
        print_count("p999", quantile(h, .999));
        print_count("max", h->largest);
    }
    printf("}");
}

static void print_report(uint64_t unfinished) {
    printf("{\"event\": \"report\", \"mode\": \"%s\", \"seconds\": %.3f", mode_names[options.mode], options.seconds);
    print_count("requests", requests);
    print_count("chunks", chunks_seen);
    print_count("errors", errors);
    print_count("unfinished", unfinished);
    print_count("dropped", refused_to_queue);
    print_count("dials", dials);
    print_count("streams_begun", (uint64_t)streams_begun);
    print_count("bytes_in", bytes_in);
    print_count("bytes_out", bytes_out);
    print_histogram("latency_us", &latency);
    print_histogram("first_token_us", &first_token);
    print_histogram("relay_us", &relay_delay);
    print_histogram("gap_us", &gap);
    printf(", \"error_kinds\": {");
    for (int i = 0; i < kinds_used; i++)
        printf("%s\"%s\": %llu", i ? ", " : "", kinds[i].text, (unsigned long long)kinds[i].count);
    printf("}}\n");
}

static connection *new_connection(void) {
    connection *c = must(calloc(1, sizeof *c));
    c->fd = -1;
    return c;
}

static void say(const char *event) {
    printf("{\"event\": \"%s\"}\n", event);
    fflush(stdout);
}

static void handle(connection *c, uint32_t events) {
    if (c->fd < 0) return;
    if ((events & EPOLLOUT) && c->busy) {
        int problem = 0;
        socklen_t length = sizeof problem;
        if (!c->online && !getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &problem, &length) && problem) {
            hang_up(c);
            return end(c, strerror(problem));
        }
        send_request(c);
    }
    if (c->fd >= 0 && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) read_answer(c);
}

/* Starts what is due by now; returns when the next is. */
static uint64_t start_arrivals(uint64_t now, uint64_t *next_arrival, connection **all, int *made) {
    for (; *next_arrival <= now && *next_arrival < window_end;
         *next_arrival += (uint64_t)(-log(1 - drand48()) / options.rate_per_s * 1e6)) {
        connection *c = free_connections;
        if (c) free_connections = c->next_free;
        else if (*made < OPEN_CAP) c = all[(*made)++] = new_connection();
        if (c) begin(c, *next_arrival);
        else refused_to_queue++;
    }
    return *next_arrival < window_end ? *next_arrival : UINT64_MAX;
}

/* Connections come one after another over the ramp, so that streams do not all tick at once. */
static uint64_t start_connections(uint64_t now, uint64_t start, connection **all, int *made) {
    double share = options.ramp_s > 0 ? (double)(now - start) / 1e6 / options.ramp_s : 1;
    int due = share >= 1 ? options.connections : (int)(options.connections * share) + 1;
    while (*made < due && *made < options.connections) begin(all[(*made)++] = new_connection(), now_us());
    return *made < options.connections ? now + 1000 : UINT64_MAX;
}

static uint64_t busy_ones(connection **all, int made) {
    uint64_t busy = 0;
    for (int i = 0; i < made; i++) busy += (uint64_t)all[i]->busy;
    return busy;
}

static uint64_t earlier(uint64_t a, uint64_t b) { return a < b ? a : b; }

static void run(void) {
    connection **all = must(calloc((size_t)(options.mode == OPEN ? OPEN_CAP : options.connections), sizeof *all));
    int made = 0, said_begin = 0, said_held = 0, left_alone = 0;
    uint64_t start = now_us(), next_arrival = start;
    window_begin = start + (uint64_t)(options.warm_s * 1e6);
    window_end = window_begin + (uint64_t)(options.seconds * 1e6);
    uint64_t stop = window_end + (options.mode == OPEN ? OPEN_GRACE_US : 0);
    srand48(7); /* the same arrivals for every target */
    while (!left_alone) {
        uint64_t now = now_us();
        if (!said_begin && now >= window_begin) said_begin = 1, say("begin");
        if (now >= stop || (now >= window_end && !busy_ones(all, made))) break;
        uint64_t due = options.mode == OPEN ? start_arrivals(now, &next_arrival, all, &made)
                                            : start_connections(now, start, all, &made);
        if (options.mode == HOLD && !said_held && streams_begun >= options.connections) said_held = 1, say("held");
        struct epoll_event events[EVENTS];
        uint64_t landmark = !said_begin ? window_begin : now < window_end ? window_end : stop;
        int n = wait_until(poller, events, EVENTS, earlier(landmark, due));
        for (int i = 0; i < n; i++) {
            char ignored[256];
            if (events[i].data.ptr) handle(events[i].data.ptr, events[i].events);
            else if (read(STDIN_FILENO, ignored, sizeof ignored) <= 0) left_alone = 1;
        }
    }
    print_report(busy_ones(all, made));
}

static mode mode_of(const char *name) {
    for (mode m = CLOSED; m <= HOLD; m++)
        if (!strcmp(name, mode_names[m])) return m;
    fprintf(stderr, "load: no mode %s\n", name);
    exit(2);
}

int main(int count, char **arguments) {
    static const struct option known[] = {
        {"mode", 1, NULL, 'm'}, {"port", 1, NULL, 'p'}, {"connections", 1, NULL, 'c'}, {"body-bytes", 1, NULL, 'b'},
        {"seconds", 1, NULL, 's'}, {"warm", 1, NULL, 'w'}, {"rate", 1, NULL, 'r'}, {"chunks", 1, NULL, 'n'},
        {"interval-ms", 1, NULL, 'i'}, {"ramp", 1, NULL, 'R'}, {"key", 1, NULL, 'k'}, {NULL, 0, NULL, 0}};
    for (int option; (option = getopt_long(count, arguments, "", known, NULL)) != -1;) switch (option) {
        case 'm': options.mode = mode_of(optarg); break;
        case 'p': options.port = atoi(optarg); break;
        case 'c': options.connections = atoi(optarg); break;
        case 'b': options.body_bytes = atoi(optarg); break;
        case 's': options.seconds = atof(optarg); break;
        case 'w': options.warm_s = atof(optarg); break;
        case 'r': options.rate_per_s = atof(optarg); break;
        case 'n': options.chunks = atoi(optarg); break;
        case 'i': options.interval_ms = atoi(optarg); break;
        case 'R': options.ramp_s = atof(optarg); break;
        case 'k': options.key = optarg; break;
        default: return 2;
    }
    if (options.port < 1 || options.connections < 1 || options.seconds <= 0 || options.rate_per_s <= 0 ||
        strlen(options.key) > 200)
        return fprintf(stderr, "load: --port, and positive --connections, --seconds and --rate are needed\n"), 2;
    signal(SIGPIPE, SIG_IGN);
    if ((poller = epoll_create1(EPOLL_CLOEXEC)) < 0) die("epoll_create1");
    build_request();
    watch(poller, EPOLL_CTL_ADD, STDIN_FILENO, EPOLLIN, NULL);
    run();
    return 0;
}
