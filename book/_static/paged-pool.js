/* <paged-pool>: the same chats in two memories, one reserved run each and blocks.
 *
 * The first half is bookkeeping without a page: ContiguousPool, PagedPool and PoolStory do what
 * paged_kv/contiguous.py, block_pool.py, block_manager.py and copy_on_write.py do, and
 * tests/test_widgets.py holds them against those modules.  The second half draws it.
 */
(function () {
  "use strict";

  // ------------------------------------------------------------------ bookkeeping

  /** A pool that cannot serve a request now, or (`never`) ever; nothing has changed. */
  class Refusal extends Error {
    constructor(message, never = false) {
      super(message);
      this.never = never;
    }
  }

  const blocksFor = (tokens, blockSize) => Math.ceil(tokens / blockSize);

  /** Slots in a row; each chat holds one run of `reservation` slots, at the lowest place that fits. */
  class ContiguousPool {
    constructor(numSlots, reservation) {
      this.numSlots = numSlots;
      this.reservation = reservation;
      this.pieces = [[0, numSlots]]; // free: [start, length], in order of start
      this.runs = new Map(); // chat -> {start, given, used}
    }

    has(chat) {
      return this.runs.has(chat);
    }

    length(chat) {
      return this.runs.get(chat).used;
    }

    /** Give `chat` a run and put its prompt there. */
    admit(chat, tokens) {
      const slots = this.reservation;
      if (slots > this.numSlots) {
        throw new Refusal(`${slots} slots in a row needed; the pool has ${this.numSlots}`, true);
      }
      if (tokens > slots) {
        throw new Refusal(`its ${tokens} tokens exceed the reservation of ${slots}`, true);
      }
      const at = this.pieces.findIndex(([, length]) => length >= slots);
      if (at < 0) {
        const longest = Math.max(0, ...this.pieces.map(([, length]) => length));
        throw new Refusal(`${slots} slots in a row needed; ${this.free} free, longest run ${longest}`);
      }
      const [start, length] = this.pieces[at];
      this.pieces.splice(at, 1, ...(length > slots ? [[start + slots, length - slots]] : []));
      this.runs.set(chat, { start, given: slots, used: tokens });
      return { start };
    }

    write(chat, tokens) {
      const run = this.runs.get(chat);
      if (run.used + tokens > run.given) {
        throw new Refusal(`'${chat}' needs ${run.used + tokens} slots, its reservation has ${run.given}`);
      }
      run.used += tokens;
      return {};
    }

    finish(chat) {
      const { start, given } = this.runs.get(chat);
      this.runs.delete(chat);
      this.pieces.push([start, given]);
      this.pieces.sort((a, b) => a[0] - b[0]);
      this.pieces = this.pieces.reduce((merged, piece) => {
        const last = merged[merged.length - 1];
        if (last && last[0] + last[1] === piece[0]) last[1] += piece[1];
        else merged.push([...piece]);
        return merged;
      }, []);
      return { start };
    }

    /** One run cannot be shared: the child gets its own, and every token is copied. */
    fork(parent, child) {
      const tokens = this.length(parent);
      return { ...this.admit(child, tokens), copiedTokens: tokens };
    }

    get free() {
      return this.pieces.reduce((sum, [, length]) => sum + length, 0);
    }

    counts() {
      let used = 0;
      let held = 0;
      for (const run of this.runs.values()) {
        used += run.used;
        held += run.given;
      }
      return { used, held, wasted: held - used, free: this.free };
    }

    snapshot() {
      const reservations = {};
      for (const [chat, run] of this.runs) reservations[chat] = [run.start, run.given, run.used];
      return { num_slots: this.numSlots, reservations, pieces: this.pieces.map((piece) => [...piece]) };
    }
  }

  /** Blocks by id: a queue of the free ones, a count of holders each, one table a chat. */
  class PagedPool {
    constructor(numBlocks, blockSize) {
      this.numBlocks = numBlocks;
      this.blockSize = blockSize;
      this.queue = Array.from({ length: numBlocks }, (_, block) => block);
      this.refCounts = new Array(numBlocks).fill(0);
      this.tables = new Map(); // chat -> block ids
      this.lengths = new Map(); // chat -> tokens
    }

    has(chat) {
      return this.tables.has(chat);
    }

    length(chat) {
      return this.lengths.get(chat);
    }

    take(count) {
      if (count > this.queue.length) {
        throw new Refusal(`${count} blocks needed, ${this.queue.length} free`, count > this.numBlocks);
      }
      const ids = this.queue.splice(0, count);
      for (const block of ids) this.refCounts[block] = 1;
      return ids;
    }

    release(ids) {
      for (const block of ids) {
        this.refCounts[block] -= 1;
        if (this.refCounts[block] === 0) this.queue.push(block);
      }
    }

    admit(chat, tokens) {
      const taken = this.take(blocksFor(tokens, this.blockSize));
      this.tables.set(chat, [...taken]);
      this.lengths.set(chat, tokens);
      return { taken };
    }

    /** The index of the partly filled last block that others hold too, or -1. */
    sharedTail(chat) {
      const length = this.lengths.get(chat);
      const index = Math.floor(length / this.blockSize);
      const partly = length % this.blockSize > 0;
      return partly && this.refCounts[this.tables.get(chat)[index]] > 1 ? index : -1;
    }

    /** Room for `tokens` more.  A shared tail is copied first, into the front block of the queue. */
    write(chat, tokens) {
      if (tokens === 0) return { taken: [], copies: [], tail: -1 };
      const table = this.tables.get(chat);
      const end = this.lengths.get(chat) + tokens;
      const shared = this.sharedTail(chat);
      const copying = shared < 0 ? 0 : 1;
      const ids = this.take(copying + blocksFor(end, this.blockSize) - table.length);
      const copies = [];
      if (copying) {
        copies.push([table[shared], ids[0]]);
        this.release([table[shared]]);
        table[shared] = ids[0];
      }
      const taken = ids.slice(copying);
      const tail = this.lengths.get(chat) % this.blockSize ? table[table.length - 1] : -1;
      table.push(...taken);
      this.lengths.set(chat, end);
      return { taken, copies, tail };
    }

    finish(chat) {
      const ids = this.tables.get(chat);
      const given = ids.filter((block) => this.refCounts[block] === 1);
      this.release(ids);
      this.tables.delete(chat);
      this.lengths.delete(chat);
      return { given };
    }

    /** The child's table names the same blocks; each counts one holder more; nothing is copied. */
    fork(parent, child) {
      const table = [...this.tables.get(parent)];
      for (const block of table) this.refCounts[block] += 1;
      this.tables.set(child, table);
      this.lengths.set(child, this.lengths.get(parent));
      return { shared: table };
    }

    /** For each block the slots that hold a token, and the chats that hold the block. */
    fill() {
      const blocks = this.refCounts.map(() => ({ used: 0, chats: [] }));
      for (const [chat, table] of this.tables) {
        table.forEach((block, index) => {
          const used = Math.min(this.blockSize, this.lengths.get(chat) - index * this.blockSize);
          blocks[block].used = Math.max(blocks[block].used, used);
          blocks[block].chats.push(chat);
        });
      }
      return blocks;
    }

    counts() {
      const used = this.fill().reduce((sum, block) => sum + block.used, 0);
      const held = (this.numBlocks - this.queue.length) * this.blockSize;
      return { used, held, wasted: held - used, free: this.queue.length * this.blockSize };
    }

    snapshot() {
      return {
        block_size: this.blockSize,
        num_blocks: this.numBlocks,
        free: [...this.queue],
        tables: Object.fromEntries([...this.tables].map(([chat, ids]) => [chat, [...ids]])),
        seq_lens: Object.fromEntries(this.lengths),
        ref_counts: [...this.refCounts],
      };
    }
  }

  /** A pool and the chats that wait before it, in order of arrival. */
  class Server {
    constructor(pool) {
      this.pool = pool;
      this.waiting = []; // {chat, tokens, why}
      this.notes = [];
    }

    waits(chat) {
      return this.waiting.some((one) => one.chat === chat);
    }

    /** Play one event; what happened is left in `notes`. */
    play(event) {
      this.notes = [];
      if (event.op === "arrive") this.arrive(event.chat, event.tokens);
      else if (event.op === "write") this.write(event.chat, event.tokens);
      else if (event.op === "finish") this.finish(event.chat);
      else if (event.op === "fork") this.fork(event.chat, event.child);
      else throw new TypeError(`no such event: ${event.op}`);
    }

    note(kind, chat, facts = {}) {
      this.notes.push({ kind, chat, ...facts });
    }

    knows(chat) {
      return this.pool.has(chat) || this.waits(chat);
    }

    arrive(chat, tokens) {
      if (this.knows(chat)) return;
      this.waiting.push({ chat, tokens, why: "others wait before it" });
      this.admitWaiting();
      if (this.waits(chat)) this.note("waits", chat, { why: this.waiting.find((one) => one.chat === chat).why });
    }

    admitWaiting() {
      while (this.waiting.length) {
        const [head] = this.waiting;
        try {
          this.note("admitted", head.chat, { tokens: head.tokens, ...this.pool.admit(head.chat, head.tokens) });
        } catch (refusal) {
          if (!(refusal instanceof Refusal)) throw refusal;
          head.why = refusal.message;
          if (!refusal.never) return;
          this.note("refused", head.chat, { why: refusal.message });
        }
        this.waiting.shift();
      }
    }

    write(chat, tokens) {
      if (!this.pool.has(chat)) {
        if (this.waits(chat)) this.note("still waits", chat);
        return;
      }
      try {
        this.note("wrote", chat, { tokens, ...this.pool.write(chat, tokens) });
      } catch (refusal) {
        if (!(refusal instanceof Refusal)) throw refusal;
        this.note("stuck", chat, { why: refusal.message });
      }
    }

    finish(chat) {
      if (this.waits(chat)) {
        this.waiting = this.waiting.filter((one) => one.chat !== chat);
        this.note("left", chat);
      } else if (this.pool.has(chat)) {
        this.note("finished", chat, this.pool.finish(chat));
      }
      this.admitWaiting();
    }

    fork(parent, child) {
      if (this.knows(child) || !this.knows(parent)) return;
      if (this.waits(parent)) {
        const { tokens } = this.waiting.find((one) => one.chat === parent);
        this.arrive(child, tokens);
        return;
      }
      try {
        this.note("forked", child, { parent, ...this.pool.fork(parent, child) });
      } catch (refusal) {
        if (!(refusal instanceof Refusal)) throw refusal;
        this.waiting.push({ chat: child, tokens: this.pool.length(parent), why: refusal.message });
        this.note("waits", child, { why: refusal.message });
      }
    }
  }

  /** A list of events, played into both memories: change a setting and the same story is told anew. */
  class PoolStory {
    /** Settings: slots, blockSize, reservation.  Slots are cut to whole blocks. */
    constructor({ slots, blockSize, reservation }, events = []) {
      this.settings = { slots, blockSize, reservation };
      this.contiguous = new Server(new ContiguousPool(slots, reservation));
      this.paged = new Server(new PagedPool(Math.floor(slots / blockSize), blockSize));
      this.frames = [];
      for (const event of events) this.play(event);
    }

    play(event) {
      for (const server of [this.contiguous, this.paged]) server.play(event);
      this.frames.push({ event, contiguous: PoolStory.frame(this.contiguous), paged: PoolStory.frame(this.paged) });
    }

    static frame(server) {
      return {
        ...server.pool.snapshot(),
        counts: server.pool.counts(),
        waiting: server.waiting.map(({ chat, tokens, why }) => [chat, tokens, why]),
        notes: server.notes,
      };
    }
  }

  Object.assign(window, { ContiguousPool, PagedPool, PoolStory });

  // ------------------------------------------------------------------ stories to play

  const CHATS = ["A", "B", "C", "D"];
  const PROMPTS = { A: 6, B: 3, C: 5, D: 5 };
  const arrive = (chat) => ({ op: "arrive", chat, tokens: PROMPTS[chat] });
  const write = (chat, tokens) => ({ op: "write", chat, tokens });

  const STORIES = {
    chats: {
      title: "Three chats, 64 slots",
      slots: 64,
      reservation: 32,
      blockSize: 4,
      events: [arrive("A"), arrive("B"), arrive("C")],
      start: 3,
    },
    "by-hand": {
      title: "The run by hand, 8 blocks of 4",
      slots: 32,
      reservation: 12,
      blockSize: 4,
      events: [
        arrive("A"),
        arrive("B"),
        arrive("C"),
        write("A", 2),
        write("A", 1),
        write("B", 2),
        { op: "finish", chat: "B" },
        write("C", 4),
        arrive("D"),
      ],
      start: 0,
    },
    "copy-on-write": {
      title: "A fork, and who copies, 6 blocks of 4",
      slots: 24,
      reservation: 12,
      blockSize: 4,
      events: [arrive("A"), { op: "fork", chat: "A", child: "B" }, write("A", 1), write("B", 1)],
      start: 1,
    },
  };

  const BLOCK_SIZES = [1, 2, 4, 8, 16];

  // ------------------------------------------------------------------ words

  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  const list = (ids) => (ids.length === 1 ? `block ${ids[0]}` : `blocks ${ids.join(", ")}`);

  function eventWords(event) {
    if (event.op === "arrive") return `${event.chat} arrives, ${plural(event.tokens, "token")}`;
    if (event.op === "write") return `${event.chat} writes ${plural(event.tokens, "token")}`;
    if (event.op === "fork") return `${event.chat} forks into ${event.child}`;
    return `${event.chat} finishes`;
  }

  function contiguousWords(note) {
    const { kind, chat, why } = note;
    if (kind === "admitted") return `${chat} gets a run from slot ${note.start}`;
    if (kind === "waits") return `${chat} is shut out: ${why}`;
    if (kind === "still waits") return `${chat} is still shut out`;
    if (kind === "refused") return `${chat} is refused: ${why}`;
    if (kind === "stuck") return `${chat} cannot go on: ${why}`;
    if (kind === "wrote") return `${chat} fills ${plural(note.tokens, "slot")} of its run`;
    if (kind === "finished") return `${chat} gives back its run`;
    if (kind === "forked") return `${chat} gets a run of its own, ${plural(note.copiedTokens, "token")} copied`;
    return `${chat} leaves the queue`;
  }

  function pagedWords(note) {
    const { kind, chat, why } = note;
    if (kind === "admitted") return `${chat} takes ${list(note.taken)} from the front of the free list`;
    if (kind === "waits") return `${chat} is shut out: ${why}`;
    if (kind === "still waits") return `${chat} is still shut out`;
    if (kind === "refused") return `${chat} is refused: ${why}`;
    if (kind === "stuck") return `${chat} cannot go on: ${why}; nothing has changed`;
    if (kind === "finished") {
      return note.given.length ? `${chat} gives back ${list(note.given)}` : `${chat} lets go; others hold its blocks`;
    }
    if (kind === "forked") return `${chat} shares ${list(note.shared)} with ${note.parent}, nothing copied`;
    if (kind === "left") return `${chat} leaves the queue`;
    const parts = note.copies.map(([from, to]) => `copy-on-write, ${chat} copies the shared block ${from} to ${to}`);
    if (!parts.length && note.tail >= 0) parts.push(`${chat} goes on in block ${note.tail}, which it alone holds`);
    if (note.taken.length) parts.push(`${chat} takes ${list(note.taken)} from the front of the free list`);
    return parts.join("; ");
  }

  const sentence = (notes, words) => notes.map(words).join("; ") || "nothing changes";

  // ------------------------------------------------------------------ the element

  /** An element with attributes and children; `text` where a child is a string. */
  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  let made = 0;

  class PagedPoolElement extends HTMLElement {
    connectedCallback() {
      if (this.built) return;
      this.built = true;
      this.number = made++;
      const asked = this.getAttribute("scenario");
      this.storyName = asked in STORIES ? asked : "chats";
      this.build();
      this.open(this.storyName, true);
    }

    /** Load a story; the attributes of the tag apply to the first one only. */
    open(name, first = false) {
      const story = STORIES[name];
      const number = (attribute, otherwise) => {
        const value = Number.parseInt((first && this.getAttribute(attribute)) || "", 10);
        return Number.isFinite(value) && value >= 0 ? value : otherwise;
      };
      const blockSize = number("block-size", story.blockSize);
      this.storyName = name;
      this.settings = {
        slots: story.slots,
        blockSize: BLOCK_SIZES.includes(blockSize) ? blockSize : story.blockSize,
        reservation: Math.min(story.slots, Math.max(4, number("reservation", story.reservation))),
      };
      this.events = [...story.events];
      this.at = Math.min(this.events.length, number("step", story.start));
      this.slider.max = String(story.slots);
      this.slider.value = String(this.settings.reservation);
      this.picker.value = String(this.settings.blockSize);
      this.scenario.value = name;
      this.show(first ? null : "opened");
    }

    build() {
      const id = (word) => `pk-pool-${this.number}-${word}`;
      const button = (label, act, attributes = {}) => {
        const press = () => {
          if (element.getAttribute("aria-disabled") !== "true") act();
        };
        const element = make("button", { type: "button", class: "pkw-button", onclick: press, ...attributes }, label);
        return element;
      };

      this.scenario = make("select", { id: id("story"), onchange: () => this.open(this.scenario.value) });
      for (const [name, story] of Object.entries(STORIES)) {
        this.scenario.append(make("option", { value: name }, story.title));
      }
      this.back = button("Back", () => this.move(-1));
      this.next = button("Next step", () => this.move(1));
      this.restart = button("Start over", () => this.open(this.storyName));
      this.progress = make("span", { class: "pkw-progress" });

      this.slider = make("input", {
        type: "range", id: id("reservation"), min: 4, max: 64, step: 4,
        oninput: () => this.set("reservation", Number(this.slider.value)),
      });
      this.sliderSays = make("span", { class: "pkw-output", "aria-hidden": "true" });
      this.picker = make("select", {
        id: id("block"), onchange: () => this.set("blockSize", Number(this.picker.value)),
      });
      for (const size of BLOCK_SIZES) this.picker.append(make("option", { value: size }, `${size}`));

      this.rows = {};
      const chats = make("div", { class: "pkw-chats", role: "group", "aria-label": "Chats" });
      for (const chat of CHATS) {
        const row = {
          says: make("span", { class: "pkw-tokens" }),
          one: button("+1", () => this.act(write(chat, 1)), { "aria-label": `${chat} writes 1 token` }),
          four: button("+4", () => this.act(write(chat, 4)), { "aria-label": `${chat} writes 4 tokens` }),
          fork: button("fork", () => this.act({ op: "fork", chat, child: this.idle() })),
          come: button("arrive", () => this.act(this.here(chat) ? { op: "finish", chat } : arrive(chat))),
        };
        this.rows[chat] = row;
        chats.append(
          make(
            "div",
            { class: "pkw-chat", role: "group", "aria-label": `Chat ${chat}` },
            make("span", { class: `pkw-badge pkw-${chat}`, "aria-hidden": "true" }, chat),
            row.says,
            make("span", { class: "pkw-buttons" }, row.one, row.four, row.fork, row.come),
          ),
        );
      }
      this.everyone = button("+1 for all", () => this.step(), { "aria-label": "Every chat writes 1 token" });

      this.said = make("p", { class: "pkw-said", role: "status", "aria-live": "polite" });
      this.sides = {
        contiguous: this.side(id("old"), "One reserved run a chat"),
        paged: this.side(id("new"), "Blocks, one at a time"),
      };
      this.log = make("tbody");
      this.logBox = make(
        "div",
        { class: "pkw-scroll", tabindex: 0, role: "region", "aria-label": "History of the blocks, step by step" },
        make(
          "table",
          { class: "pkw-log" },
          make(
            "thead", {},
            make(
              "tr", {},
              ...["", "event", "block tables", "free list, front first", "wasted"].map((head) =>
                head ? make("th", { scope: "col" }, head) : make("td"),
              ),
            ),
          ),
          this.log,
        ),
      );

      this.replaceChildren(
        make(
          "section",
          { class: "pkw pkw-pool", "aria-label": "A pool to play with" },
          make(
            "div",
            { class: "pkw-bar" },
            make("label", { class: "pkw-field", for: id("story") }, "Story ", this.scenario),
            make("span", { class: "pkw-buttons" }, this.back, this.next, this.restart),
            this.progress,
          ),
          make(
            "div",
            { class: "pkw-bar pkw-knobs" },
            make(
              "div",
              { class: "pkw-field pkw-grow" },
              make("label", { for: id("reservation") }, "Slots reserved for each chat, the old way"),
              this.slider,
              this.sliderSays,
            ),
            make("label", { class: "pkw-field", for: id("block") }, "Block size in tokens ", this.picker),
          ),
          chats,
          make("div", { class: "pkw-all" }, this.everyone, this.said),
          make("div", { class: "pkw-sides" }, this.sides.contiguous.section, this.sides.paged.section),
          make(
            "p",
            { class: "pkw-key" },
            ...[
              ["pkw-A", "A", "holds a token"],
              ["pkw-wasted", "", "set aside, empty"],
              ["pkw-free", "", "free"],
              ["pkw-A pkw-fresh", "A", "new in this step"],
            ].map(([look, letter, word]) =>
              make("span", {}, make("span", { class: `pkw-cell ${look}`, "aria-hidden": "true" }, letter), word),
            ),
          ),
          make("details", { class: "pkw-history" }, make("summary", {}, "History of the blocks"), this.logBox),
        ),
      );
    }

    side(id, title) {
      const parts = {
        counts: make("dl", { class: "pkw-counts" }),
        picture: make("div", { class: "pkw-picture", role: "img" }),
        waiting: make("div", { class: "pkw-waiting" }),
        tables: make("div", { class: "pkw-tables" }),
      };
      parts.section = make(
        "section",
        { class: "pkw-side", "aria-labelledby": id },
        make("p", { class: "pkw-title", id }, title),
        parts.waiting,
        parts.counts,
        parts.picture,
        parts.tables,
      );
      return parts;
    }

    // ---- what the reader does

    here(chat) {
      return this.story.contiguous.knows(chat) || this.story.paged.knows(chat);
    }

    idle() {
      return CHATS.find((chat) => !this.here(chat));
    }

    act(...events) {
      this.events = [...this.events.slice(0, this.at), ...events];
      this.at = this.events.length;
      this.show("acted", events.length);
    }

    step() {
      this.act(...CHATS.filter((chat) => this.here(chat)).map((chat) => write(chat, 1)));
    }

    move(by) {
      this.at = Math.min(this.events.length, Math.max(0, this.at + by));
      this.show(by > 0 ? "acted" : "went back");
    }

    set(name, value) {
      this.settings[name] = value;
      this.show("set");
    }

    // ---- what the reader sees

    show(why, steps = 1) {
      this.story = new PoolStory(this.settings, this.events.slice(0, this.at));
      this.steps = why === "acted" ? Math.min(steps, this.at) : 0;
      this.showControls();
      this.showContiguous();
      this.showPaged();
      this.showLog();
      this.say(why);
    }

    showControls() {
      const off = (element, is) => element.setAttribute("aria-disabled", is ? "true" : "false");
      off(this.back, this.at === 0);
      off(this.next, this.at === this.events.length);
      this.next.classList.toggle("pkw-main", this.at < this.events.length);
      const upcoming = this.events[this.at];
      this.progress.textContent = `step ${this.at} of ${this.events.length}`;
      if (upcoming) this.progress.textContent += `, next: ${eventWords(upcoming)}`;
      const idle = this.idle();
      for (const chat of CHATS) {
        const row = this.rows[chat];
        const here = this.here(chat);
        const { paged } = this.story;
        row.says.textContent = paged.pool.has(chat)
          ? plural(paged.pool.length(chat), "token")
          : here ? "waits" : "not here";
        off(row.one, !here);
        off(row.four, !here);
        off(row.fork, !here || !idle);
        row.fork.setAttribute("aria-label", here && idle ? `Fork ${chat} into ${idle}` : `Fork ${chat}`);
        row.come.textContent = here ? "finish" : "arrive";
        row.come.setAttribute("aria-label", here ? `${chat} finishes` : `${chat} arrives`);
      }
      off(this.everyone, !CHATS.some((chat) => this.here(chat)));
      const { reservation, slots } = this.settings;
      this.sliderSays.textContent = `${reservation} of ${slots} slots each: room for ${plural(Math.floor(slots / reservation), "chat")}`;
      this.slider.setAttribute("aria-valuetext", this.sliderSays.textContent);
    }

    /** Slots written in this step: chat -> the tokens it had before it. */
    before(layout) {
      const frame = this.story.frames[this.story.frames.length - 1 - this.steps];
      return frame ? frame[layout] : null;
    }

    showContiguous() {
      const { pool, waiting } = this.story.contiguous;
      const side = this.sides.contiguous;
      const old = this.steps ? this.before("contiguous") : undefined;
      const cells = Array.from({ length: pool.numSlots }, () => make("span", { class: "pkw-cell pkw-free" }));
      for (const [chat, { start, given, used }] of pool.runs) {
        const had = old === undefined ? used : (old && old.reservations[chat] ? old.reservations[chat][2] : 0);
        for (let slot = start; slot < start + given; slot += 1) {
          const holds = slot < start + used;
          cells[slot].className = `pkw-cell ${holds ? `pkw-${chat}` : `pkw-wasted pkw-of-${chat}`}`;
          if (holds && slot >= start + had) cells[slot].classList.add("pkw-fresh");
          if (holds) cells[slot].textContent = chat;
          if (slot === start) cells[slot].classList.add("pkw-first");
        }
      }
      side.picture.replaceChildren(make("div", { class: "pkw-slots" }, ...cells));
      const runs = [...pool.runs].map(
        ([chat, { start, given, used }]) => `${chat}: slots ${start} to ${start + given - 1}, ${used} hold tokens`,
      );
      side.picture.setAttribute("aria-label", `${pool.numSlots} slots. ${runs.join(". ") || "All free"}.`);
      this.showCounts(side, pool.counts(), "reserved");
      this.showWaiting(side, waiting);
      side.tables.replaceChildren(
        this.table(
          ["chat", "starts at", "reserved", "used"],
          [...pool.runs].map(([chat, { start, given, used }]) => [chat, start, given, used]),
        ),
      );
    }

    showPaged() {
      const { pool, waiting } = this.story.paged;
      const side = this.sides.paged;
      const size = pool.blockSize;
      const old = this.steps ? this.before("paged") : undefined;
      const oldFree = old === undefined ? [] : old ? old.free : [...pool.refCounts.keys()];
      const had = (chat) => {
        if (old && chat in old.seq_lens) return old.seq_lens[chat];
        return oldFree.includes(pool.tables.get(chat)[0]) ? 0 : pool.length(chat);
      };
      const last = this.steps ? this.story.frames.slice(-this.steps) : [];
      const copies = last.flatMap(({ paged }) => paged.notes.flatMap((note) => note.copies || []));
      const blocks = pool.fill().map(({ used, chats }, block) => {
        const cells = Array.from({ length: size }, (_, slot) => {
          if (!chats.length) return make("span", { class: "pkw-cell pkw-free" });
          if (slot >= used) return make("span", { class: "pkw-cell pkw-wasted" });
          const owners = chats.filter((chat) => {
            const at = pool.tables.get(chat).indexOf(block) * size;
            return at + slot < pool.length(chat);
          });
          const letters = owners.length > 2 ? `${owners.length}×` : owners.join("");
          const cell = make("span", { class: `pkw-cell pkw-${owners[0]}` }, letters);
          const position = (chat) => pool.tables.get(chat).indexOf(block) * size + slot;
          if (this.steps && owners.some((chat) => position(chat) >= had(chat))) cell.classList.add("pkw-fresh");
          if (owners.length > 1) {
            const stops = owners.map((chat, i) => {
              const [from, to] = [i, i + 1].map((n) => `${Math.round((100 * n) / owners.length)}%`);
              return `var(--w-${chat.toLowerCase()}) ${from} ${to}`;
            });
            cell.classList.add("pkw-shared");
            cell.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
          }
          return cell;
        });
        const head = make("span", { class: "pkw-id" }, `${block}`);
        if (pool.refCounts[block] > 1) head.append(make("b", {}, ` ×${pool.refCounts[block]}`));
        const box = make("div", { class: "pkw-block" }, head, make("div", { class: "pkw-slots" }, ...cells));
        if (!chats.length) box.classList.add("pkw-idle");
        if (chats.length && oldFree.includes(block)) box.classList.add("pkw-fresh");
        if (copies.some(([from]) => from === block)) box.classList.add("pkw-copied");
        return box;
      });
      side.picture.replaceChildren(make("div", { class: `pkw-blocks pkw-size-${size}` }, ...blocks));
      const says = [...pool.tables].map(
        ([chat, ids]) => `${chat}: ${plural(pool.length(chat), "token")} in ${ids.length ? list(ids) : "no block"}`,
      );
      side.picture.setAttribute(
        "aria-label",
        `${plural(pool.numBlocks, "block")} of ${size}. ${says.join(". ") || "All free"}.`,
      );
      this.showCounts(side, pool.counts(), "in blocks");
      this.showWaiting(side, waiting);
      const shared = pool.refCounts.some((count) => count > 1);
      side.tables.replaceChildren(
        this.table(
          ["chat", "block table", "tokens"],
          [...pool.tables].map(([chat, ids]) => [chat, ids.join(" "), pool.length(chat)]),
        ),
        make(
          "p",
          { class: "pkw-queue" },
          make("b", {}, "Free list"), " front ",
          make("code", { class: "pkw-ids" }, pool.queue.join(" ") || "empty"), " back",
        ),
        make(
          "p",
          { class: "pkw-queue" },
          make("b", {}, "Reference counts"), shared ? " by block id " : " ",
          make("code", { class: "pkw-ids" }, this.countWords(pool, shared)),
        ),
      );
    }

    countWords(pool, shared) {
      if (shared) return [...pool.refCounts].map((count, block) => `${block}:${count}`).join(" ");
      const held = pool.numBlocks - pool.queue.length;
      return `${plural(held, "block")} at 1, ${pool.queue.length} at 0`;
    }

    showCounts(side, { used, held, wasted, free }, heldWord) {
      const parts = [["hold a token", used], [heldWord, held], ["wasted", wasted], ["free", free]];
      side.counts.replaceChildren(
        ...parts.map(([word, count]) =>
          make("div", { class: `pkw-count pkw-count-${word.split(" ")[0]}` }, make("dt", {}, word), make("dd", {}, `${count}`)),
        ),
      );
    }

    showWaiting(side, waiting) {
      const lines = waiting.map(({ chat, tokens, why }) =>
        make("p", {}, make("b", {}, `${chat} is shut out`), ` with ${plural(tokens, "token")}: ${why}`),
      );
      side.waiting.replaceChildren(...(lines.length ? lines : [make("p", { class: "pkw-fine" }, "nobody waits")]));
      side.waiting.classList.toggle("pkw-alarm", lines.length > 0);
    }

    table(heads, rows) {
      return make(
        "table", { class: "pkw-table" },
        make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
        make(
          "tbody", {},
          ...rows.map(([chat, ...values]) =>
            make(
              "tr", {},
              make("th", { scope: "row" }, make("span", { class: `pkw-badge pkw-${chat}` }, chat)),
              ...values.map((value) => make("td", {}, `${value}`)),
            ),
          ),
        ),
      );
    }

    showLog() {
      const rows = this.story.frames.map(({ event, paged }, index) => {
        const tables = Object.entries(paged.tables).map(([chat, ids]) => `${chat} [${ids.join(", ")}]`);
        const cells = [eventWords(event), tables.join(" "), paged.free.join(" ") || "empty", paged.counts.wasted];
        return make(
          "tr",
          index + 1 === this.at ? { "aria-current": "step" } : {},
          make("th", { scope: "row" }, `${index + 1}`),
          ...cells.map((cell) => make("td", {}, `${cell}`)),
        );
      });
      this.log.replaceChildren(...rows);
      this.logBox.scrollTop = this.logBox.scrollHeight;
    }

    say(why) {
      const lines = [];
      if (why === "acted") {
        for (const { event, contiguous, paged } of this.story.frames.slice(-this.steps)) {
          lines.push(
            `${eventWords(event)}. Run: ${sentence(contiguous.notes, contiguousWords)}. ` +
              `Blocks: ${sentence(paged.notes, pagedWords)}.`,
          );
        }
      } else {
        lines.push(
          `Reservation ${this.settings.reservation}, block size ${this.settings.blockSize}. ` +
            `Runs: ${this.where(this.story.contiguous)}. Blocks: ${this.where(this.story.paged)}.`,
        );
      }
      const text = lines.join(" ");
      // The first picture is not an announcement.
      const first = this.at < this.events.length ? "Press Next step" : "Move the slider";
      this.said.textContent = why ? text : `${first}, or let a chat write.`;
    }

    where(server) {
      const live = CHATS.filter((chat) => server.pool.has(chat));
      const out = CHATS.filter((chat) => server.waits(chat));
      const parts = [live.length ? `${live.join(", ")} in` : "no chat in"];
      if (out.length) parts.push(`${out.join(", ")} shut out`);
      return parts.join(", ");
    }
  }

  const define = () => {
    if (!customElements.get("paged-pool")) customElements.define("paged-pool", PagedPoolElement);
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", define);
  else define();
})();
