// Messages between processes of one machine. The receiver copies out of the sender's memory with process_vm_readv: one
// copy, where a socket makes two and calls the kernel for each few kilobytes.
//
// Each process shows the others a page of memory: a bell, which they ring when there is something to do for it, and for
// each of them a ring of slots with the messages it has for them. Short messages lie in the slot itself.
//
// Messages whose sum alone is wanted are read in chunks that fit into the processor's cache, and added from there.

#define _GNU_SOURCE
#include "native.h"

#if defined(__linux__)
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 4096        // messages to one receiver at a time; more wait at the sender
#define SHORT 216         // bytes of a message that lies in its slot
#define CHUNK (1 << 17)   // bytes of each message that are added at a time
#define LOOK 200          // milliseconds between two looks if the others still run
#define MAGIC 0x7a650001  // to be counted up when the layout of a page changes

// Older headers lack them.
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#define WAIT_ON 0  // FUTEX_WAIT
#define WAKE 1     // FUTEX_WAKE

enum slot_state { EMPTY, SENT, COPIED, REFUSED };  // the sender writes the first two, the receiver the others, and EMPTY
enum op_state { POSTED, DONE };

struct slot {
    _Atomic uint32_t state;
    uint32_t number;  // of the message, as a slot is used again
    uint64_t key, address, bytes;
    char content[SHORT];
    int32_t error, unused;  // why the receiver refused it
};

struct page {
    uint32_t magic;
    uint64_t own_address;     // where its process has it
    _Alignas(64) _Atomic uint32_t bell;
    _Atomic uint32_t sleepers;
    _Atomic uint32_t closed;  // what was sent and not copied may be overwritten
    _Atomic uint32_t blocked; // a message waits for a slot
    _Alignas(64) struct slot slots[][SLOTS];  // by receiver
};

// A message that this process sends or receives.
struct op {
    struct op *next;
    int32_t sends, waited, error;
    _Atomic int32_t state;
    uint64_t key, bytes;
    char *memory;
    struct slot *slot;
    struct total *total;  // that it is a part of, or null
};

struct queue {
    struct op *first, **end;
};

struct peer {
    struct page *page;
    struct slot *in, *out;             // the rings of both directions
    pid_t pid;
    int pidfd, gone;
    uint32_t seen, sent;               // messages
    uint32_t arrived[SLOTS], waiting;  // numbers of messages that nobody has received yet, in order
    struct queue unsent, flying, posted;
};

// Messages from several peers that are added up once all are there. Whoever waits for `op` frees it.
struct total {
    struct op op;
    struct sum sum;
    const char *own;  // this process's part
    int64_t elements;
    int32_t set, count, place, missing;  // place of its own among all parts; `count` is of the others
    struct part {
        struct op op;
        struct peer *peer;
    } parts[];
};

struct link {
    pthread_mutex_t lock;
    pthread_t thread;
    int rank, size, file, started, closing;
    pid_t owner;                       // a fork has neither the thread nor the messages
    int64_t looked;                    // when, in milliseconds
    _Atomic uint64_t sent;             // bytes of messages that others have copied, or can without this process
    size_t bytes;
    struct page *page;
    struct peer *peers;
};

static size_t page_bytes(int size) { return sizeof(struct page) + sizeof(struct slot) * SLOTS * (size_t)size; }

static void put(struct queue *queue, struct op *op) {
    op->next = NULL;
    *queue->end = op;
    queue->end = &op->next;
}

// Take the operation out that `place` points to; what came after it is there then.
static struct op *take_out(struct queue *queue, struct op **place) {
    struct op *op = *place;
    *place = op->next;
    if (!op->next) queue->end = place;
    return op;
}

static void ring(struct page *page) {
    atomic_fetch_add(&page->bell, 1);
    if (atomic_load(&page->sleepers)) syscall(SYS_futex, &page->bell, WAKE, INT32_MAX, NULL, NULL, 0);
}

// Sleep until the bell has another number than it had, for at most so many milliseconds; 0 where a signal ended it.
static int sleep_until(struct page *page, uint32_t bell, int64_t milliseconds) {
    struct timespec limit = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    atomic_fetch_add(&page->sleepers, 1);
    int interrupted = syscall(SYS_futex, &page->bell, WAIT_ON, bell, &limit, NULL, 0) && errno == EINTR;
    atomic_fetch_sub(&page->sleepers, 1);
    return !interrupted;
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000LL + time.tv_nsec / 1000000;
}

static void finish(struct link *link, struct op *op, int error) {
    op->error = error;
    if (op->sends && !error) atomic_fetch_add_explicit(&link->sent, op->bytes, memory_order_relaxed);
    int waited = op->waited;
    atomic_store(&op->state, DONE);  // from now on, whoever waits may free it
    if (waited) ring(link->page);
}

static int copy_from(pid_t pid, char *to, uint64_t from, uint64_t bytes) {
    while (bytes) {
        struct iovec here = {to, bytes}, there = {(void *)(uintptr_t)from, bytes};
        ssize_t copied = process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (copied <= 0) return copied < 0 ? errno : EFAULT;
        to += copied, from += copied, bytes -= copied;
    }
    return 0;
}

// Add up the parts of a total, all of which are there.
static int add_up(struct total *total) {
    int64_t wide = bytes_of(total->sum.type), step = CHUNK / wide;
    if (step > total->elements) step = total->elements;
    const void *parts[total->count + 1];
    char *chunks = malloc((size_t)(total->count * step * wide) + 1);  // + 1: 0 bytes may be null
    int error = chunks ? 0 : ENOMEM;
    struct sum sum = total->sum;
    sum.parts = parts;
    for (int64_t i = 0; i < total->elements && !error; i += step) {
        int64_t count = total->elements - i < step ? total->elements - i : step;
        for (int k = 0; k < total->count && !error; k++) {
            struct slot *slot = total->parts[k].op.slot;
            char *chunk = chunks + k * step * wide;
            if (slot->bytes <= SHORT) chunk = slot->content;
            else error = copy_from(total->parts[k].peer->pid, chunk, slot->address + i * wide, count * wide);
            parts[k + (k >= total->place)] = chunk;
        }
        parts[total->place] = total->own + i * wide;
        if (!error) zeromesh_sum(total->set, &sum, count);
        sum.out = (char *)sum.out + count * bytes_of(sum.out_type);
    }
    free(chunks);
    for (int k = 0; k < total->count && !error; k++)
        if (atomic_load(&total->parts[k].peer->page->closed)) error = ESRCH;  // as where one message is copied
    return error;
}

// Tell the sender of a message that it has been read, or why it was not.
static void release(struct peer *peer, struct slot *slot, int error) {
    int is_short = slot->bytes <= SHORT;
    slot->error = error;
    atomic_store(&slot->state, is_short ? EMPTY : error ? REFUSED : COPIED);
    if (!is_short || atomic_exchange(&peer->page->blocked, 0)) ring(peer->page);
}

static void end_total(struct link *link, struct total *total, int error) {
    for (int k = 0; k < total->count; k++)
        if (total->parts[k].op.slot) release(total->parts[k].peer, total->parts[k].op.slot, error);
    finish(link, &total->op, error);
}

// End a total of which not all parts will come.
static void abandon(struct link *link, struct total *total, int error) {
    for (int k = 0; k < total->count; k++) {
        struct queue *posted = &total->parts[k].peer->posted;
        for (struct op **place = &posted->first; *place;)
            if ((*place)->total == total) take_out(posted, place); else place = &(*place)->next;
    }
    end_total(link, total, error);
}

static void send_waiting(struct link *link, struct peer *peer) {
    int placed = 0;
    while (peer->unsent.first) {
        struct slot *slot = &peer->out[peer->sent % SLOTS];
        if (atomic_load(&slot->state) != EMPTY) {
            atomic_store(&link->page->blocked, 1);
            if (atomic_load(&slot->state) != EMPTY) break;  // else it became free before its receiver could see that
        }
        struct op *op = take_out(&peer->unsent, &peer->unsent.first);
        slot->number = peer->sent++;
        slot->key = op->key;
        slot->bytes = op->bytes;
        slot->address = (uint64_t)(uintptr_t)op->memory;
        if (op->bytes <= SHORT) memcpy(slot->content, op->memory, op->bytes);
        atomic_store_explicit(&slot->state, SENT, memory_order_release);
        op->slot = slot;
        if (op->bytes <= SHORT) finish(link, op, 0); else put(&peer->flying, op);
        placed = 1;
    }
    if (placed) ring(peer->page);
}

static int reap(struct link *link, struct peer *peer) {
    int count = 0;
    for (struct op **place = &peer->flying.first; *place;) {
        uint32_t state = atomic_load_explicit(&(*place)->slot->state, memory_order_acquire);
        if (state != COPIED && state != REFUSED) {
            place = &(*place)->next;
            continue;
        }
        struct op *op = take_out(&peer->flying, place);
        int error = state == COPIED ? 0 : op->slot->error;
        atomic_store_explicit(&op->slot->state, EMPTY, memory_order_release);
        finish(link, op, error);
        count++;
    }
    return count;
}

// Take the first message with this key out of those that have arrived, or return null. Where `brief`, a long message stays
// for another thread, and *left says so.
static struct slot *match(struct peer *peer, uint64_t key, int brief, int *left) {
    for (uint32_t i = 0; i < peer->waiting; i++) {
        struct slot *slot = &peer->in[peer->arrived[i] % SLOTS];
        if (slot->key != key) continue;
        if (brief && slot->bytes > SHORT) {
            *left = 1;
            return NULL;
        }
        memmove(&peer->arrived[i], &peer->arrived[i + 1], (--peer->waiting - i) * sizeof(uint32_t));
        return slot;
    }
    return NULL;
}

// Receive what has arrived from a peer; return how many messages. The lock is held, but not during copies. `brief` and `left`
// are those of `match`.
static int receive(struct link *link, struct peer *peer, int brief, int *left) {
    int count = 0;
    struct slot *slot;
again:
    while ((slot = &peer->in[peer->seen % SLOTS], atomic_load_explicit(&slot->state, memory_order_acquire) == SENT) &&
           slot->number == peer->seen)
        peer->arrived[peer->waiting++] = peer->seen++;
    for (struct op **place = &peer->posted.first; *place && peer->waiting; place = &(*place)->next) {
        if (!(slot = match(peer, (*place)->key, brief, left))) continue;
        struct op *op = take_out(&peer->posted, place);
        struct total *total = op->total;
        int is_short = slot->bytes <= SHORT, error = slot->bytes == op->bytes ? 0 : EMSGSIZE;
        count++;
        if (total) {
            op->slot = slot;
            if (error) total->op.error = error;  // told once all are there, to all of them
            if (!--total->missing) {
                error = total->op.error;
                pthread_mutex_unlock(&link->lock);
                if (!error) error = add_up(total);
                pthread_mutex_lock(&link->lock);
                for (int k = 0; k < total->count && !error; k++)
                    if (total->parts[k].peer->gone && op->bytes > SHORT) error = ESRCH;
                end_total(link, total, error);
            }
            goto again;
        }
        if (!error && is_short) memcpy(op->memory, slot->content, op->bytes);
        if (!error && !is_short) {
            uint64_t from = slot->address;
            pthread_mutex_unlock(&link->lock);
            error = copy_from(peer->pid, op->memory, from, op->bytes);
            if (!error && atomic_load(&peer->page->closed)) error = ESRCH;  // its memory may have been another's by then
            pthread_mutex_lock(&link->lock);
        }
        release(peer, slot, error);
        finish(link, op, error);
        goto again;  // the queue may have changed meanwhile
    }
    return count;
}

static void give_up(struct link *link, struct peer *peer) {
    struct queue *queues[] = {&peer->unsent, &peer->flying, &peer->posted};
    peer->gone = 1;
    for (int i = 0; i < 3; i++)
        while (queues[i]->first) {
            struct op *op = take_out(queues[i], &queues[i]->first);
            if (op->total) abandon(link, op->total, ESRCH); else finish(link, op, ESRCH);
        }
}

// End what is under way with a peer that has ended; return how many messages had come through before.
static int give_up_if_gone(struct link *link, struct peer *peer, int brief, int *left) {
    if (!peer->gone && !atomic_load(&peer->page->closed)) return 0;
    // The peer may have copied or sent something between the caller's last look and its end.
    int count = reap(link, peer);
    if (peer->posted.first) count += receive(link, peer, brief, left);
    give_up(link, peer);
    return count;
}

static int progress(struct link *link, int brief, int *left) {
    int count = 0;
    for (int i = 0; i < link->size; i++) {
        struct peer *peer = &link->peers[i];
        if (!peer->page) continue;
        count += reap(link, peer);
        if (peer->unsent.first) send_waiting(link, peer);
        if (peer->posted.first) count += receive(link, peer, brief, left);
        count += give_up_if_gone(link, peer, brief, left);
    }
    return count;
}

// See which processes have ended, if that was not done lately.
static void look(struct link *link) {
    int64_t time = now();
    if (time < link->looked + LOOK) return;
    link->looked = time;
    for (int i = 0; i < link->size; i++) {
        struct peer *peer = &link->peers[i];
        struct pollfd ended = {peer->pidfd, POLLIN, 0};
        uint32_t magic = 0;
        if (!peer->page || peer->gone) continue;
        if (peer->pidfd >= 0)
            peer->gone = poll(&ended, 1, 0) > 0;
        else
            peer->gone = copy_from(peer->pid, (char *)&magic, peer->page->own_address, sizeof magic) || magic != MAGIC;
    }
}

static void *serve(void *argument) {
    struct link *link = argument;
    int left;
    pthread_mutex_lock(&link->lock);
    while (!link->closing) {
        uint32_t bell = atomic_load(&link->page->bell);
        if (progress(link, 0, &left)) continue;
        pthread_mutex_unlock(&link->lock);
        sleep_until(link->page, bell, LOOK);
        pthread_mutex_lock(&link->lock);
        look(link);
    }
    pthread_mutex_unlock(&link->lock);
    return NULL;
}

// A link among `size` processes, of which this one is `rank`; null if there is no memory for it. *file and *address are
// what the others need to join it.
struct link *zeromesh_link_open(int32_t rank, int32_t size, int32_t *file, uint64_t *address) {
    struct link *link = calloc(1, sizeof *link);
    if (!link) return NULL;
    link->rank = rank, link->size = size, link->bytes = page_bytes(size), link->owner = getpid();
    link->file = (int)syscall(SYS_memfd_create, "zeromesh", 1u);  // closed in programs that this one starts
    link->peers = calloc(size, sizeof *link->peers);
    link->page = MAP_FAILED;
    if (link->file >= 0 && link->peers && !ftruncate(link->file, link->bytes))
        link->page = mmap(NULL, link->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, link->file, 0);
    if (link->page == MAP_FAILED) {
        if (link->file >= 0) close(link->file);
        free(link->peers);
        free(link);
        return NULL;
    }
    pthread_mutex_init(&link->lock, NULL);
    // Where only parents may read a process's memory, its siblings are allowed to; it fails where there is no such rule.
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    link->page->magic = MAGIC;
    *file = link->file;
    *address = link->page->own_address = (uint64_t)(uintptr_t)link->page;
    return link;
}

// Join another process's page, and read its memory once; 0, or why not.
int32_t zeromesh_link_join(struct link *link, int32_t rank, int32_t pid, int32_t file, uint64_t address) {
    struct peer *peer = &link->peers[rank];
    char path[64];
    uint32_t magic = 0;
    int error = copy_from(pid, (char *)&magic, address, sizeof magic);
    if (error || magic != MAGIC) return error ? error : EPROTO;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, file);
    int opened = open(path, O_RDWR | O_CLOEXEC);
    if (opened < 0) return errno;
    void *page = mmap(NULL, link->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
    error = errno;
    close(opened);
    if (page == MAP_FAILED) return error;
    peer->page = page;
    peer->in = peer->page->slots[link->rank];
    peer->out = link->page->slots[rank];
    peer->pid = pid;
    peer->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    peer->unsent.end = &peer->unsent.first;
    peer->flying.end = &peer->flying.first;
    peer->posted.end = &peer->posted.first;
    return 0;
}

int32_t zeromesh_link_start(struct link *link) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for Python's threads
    link->started = !pthread_create(&link->thread, NULL, serve, link);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return link->started ? 0 : EAGAIN;
}

// Begin to send or receive: *handle is then the message, whose memory must stay until `wait` has set it to null. 0, or why
// it cannot be.
int32_t zeromesh_link_post(struct link *link, int32_t sends, int32_t rank, uint64_t key, void *memory, uint64_t bytes,
                           struct op **handle) {
    struct peer *peer = &link->peers[rank];
    int left = 0;
    if (getpid() != link->owner) return EPERM;
    struct op *op = calloc(1, sizeof *op);
    if (!op) return ENOMEM;
    op->sends = sends, op->key = key, op->memory = memory, op->bytes = bytes;
    pthread_mutex_lock(&link->lock);
    if (link->closing) {
        pthread_mutex_unlock(&link->lock);
        free(op);
        return ESHUTDOWN;
    }
    *handle = op;
    put(sends ? &peer->unsent : &peer->posted, op);
    if (sends) send_waiting(link, peer); else receive(link, peer, 1, &left);
    give_up_if_gone(link, peer, 1, &left);
    pthread_mutex_unlock(&link->lock);
    if (left) ring(link->page);
    return 0;
}

// Begin to receive a message of so many elements from each of `count` ranks, in their order, and to put the sum into `out`;
// `own` is this process's part, at `place` among them. Otherwise as above.
int32_t zeromesh_link_sum(struct link *link, int32_t set, const int32_t *ranks, int32_t count, int32_t place, uint64_t key,
                          const void *own, void *out, int64_t elements, int32_t type, int32_t out_type, int32_t add,
                          struct op **handle) {
    int left = 0;
    if (getpid() != link->owner) return EPERM;
    struct total *total = calloc(1, sizeof *total + sizeof *total->parts * (size_t)count);
    if (!total) return ENOMEM;
    total->sum = (struct sum){.out = out, .count = count + 1, .type = type, .out_type = out_type, .add = add};
    total->own = own, total->elements = elements;
    total->set = set, total->count = total->missing = count, total->place = place;
    pthread_mutex_lock(&link->lock);
    if (link->closing) {
        pthread_mutex_unlock(&link->lock);
        free(total);
        return ESHUTDOWN;
    }
    *handle = &total->op;
    for (int k = 0; k < count; k++) {
        struct part *part = &total->parts[k];
        part->peer = &link->peers[ranks[k]];
        part->op.key = key, part->op.bytes = elements * bytes_of(type), part->op.total = total;
        put(&part->peer->posted, &part->op);
    }
    progress(link, 1, &left);
    pthread_mutex_unlock(&link->lock);
    if (left) ring(link->page);
    return 0;
}

// 1 when the message is through, 0 if it is not after so many milliseconds, or when a signal came, and below 0 a negative
// errno. After all but 0 the message is gone, and *handle null. Below 0 milliseconds, nothing is done but to look.
int32_t zeromesh_link_wait(struct link *link, struct op **handle, int64_t milliseconds) {
    struct op *op = *handle;
    int64_t end = milliseconds < 0 ? 0 : now() + milliseconds;
    int left;
    if (getpid() != link->owner) return -EPERM;
    while (atomic_load(&op->state) != DONE) {
        if (milliseconds < 0) return 0;
        pthread_mutex_lock(&link->lock);
        op->waited = 1;
        uint32_t bell = atomic_load(&link->page->bell);
        int count = progress(link, 0, &left);
        look(link);
        pthread_mutex_unlock(&link->lock);
        if (count || atomic_load(&op->state) == DONE) continue;
        int64_t rest = end - now();
        if (rest <= 0 || !sleep_until(link->page, bell, rest < LOOK ? rest : LOOK)) return 0;
    }
    int32_t result = op->error ? -op->error : 1;
    *handle = NULL;
    free(op);
    return result;
}

uint64_t zeromesh_link_sent(struct link *link) { return atomic_load_explicit(&link->sent, memory_order_relaxed); }

// Close the link, after at most so many milliseconds in which others may copy what was sent to them, and end the thread.
void zeromesh_link_close(struct link *link, int32_t milliseconds) {
    int64_t end = now() + milliseconds;
    int left, open = 1;
    if (getpid() != link->owner || link->closing) return;
    pthread_mutex_lock(&link->lock);
    while (open) {
        uint32_t bell = atomic_load(&link->page->bell);
        progress(link, 0, &left);
        look(link);
        open = 0;
        for (int i = 0; i < link->size; i++)
            open |= link->peers[i].page && (link->peers[i].flying.first || link->peers[i].unsent.first);
        int64_t rest = end - now();
        if (!open || rest <= 0) break;
        pthread_mutex_unlock(&link->lock);
        sleep_until(link->page, bell, rest < LOOK ? rest : LOOK);
        pthread_mutex_lock(&link->lock);
    }
    link->closing = 1;
    atomic_store(&link->page->closed, 1);
    pthread_mutex_unlock(&link->lock);
    ring(link->page);
    if (link->started) pthread_join(link->thread, NULL);
    link->started = 0;
    for (int i = 0; i < link->size; i++)
        if (link->peers[i].page) ring(link->peers[i].page);
}

// Give back what a closed link has. Nobody may wait for its messages any more.
void zeromesh_link_free(struct link *link) {
    for (int i = 0; i < link->size; i++) {
        struct peer *peer = &link->peers[i];
        struct queue *queues[] = {&peer->unsent, &peer->flying, &peer->posted};
        if (!peer->page) continue;
        for (int k = 0; k < 3; k++)
            while (queues[k]->first) {
                struct op *op = take_out(queues[k], &queues[k]->first);
                if (!op->total) free(op);
                else if (!--op->total->missing) free(op->total);
            }
        munmap(peer->page, link->bytes);
        if (peer->pidfd >= 0) close(peer->pidfd);
    }
    munmap(link->page, link->bytes);
    close(link->file);
    free(link->peers);
    pthread_mutex_destroy(&link->lock);
    free(link);
}
#endif
