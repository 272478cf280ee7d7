/* <capacity-planner>: how many users fit my GPU, reserving against paging.
 *
 * The first half is arithmetic without a page: it does what paged_kv/sizing.py, config_facts.py,
 * configs.py and weights.py do, on tables that tools/planner_data.py took from them
 * (planner-models.js), and tests/test_widgets.py holds it against those modules.  Bytes of many
 * users pass 2^53, so they are BigInt.  The second half is the form.
 */
(function () {
  "use strict";

  const data = () => window.PLANNER_DATA;
  const MOST_LAYERS = 10_000; // a pasted file must not freeze the page

  // ------------------------------------------------------------------ reading a config

  /** What the reader typed cannot be sized; the message says what is wrong and what is allowed. */
  class PlanError extends Error {
    constructor(message, field = null) {
      super(message);
      this.field = field;
    }
  }

  const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

  /** A JSON value, spelled as Python spells it. */
  function spell(value) {
    if (value === null || value === undefined) return "None";
    if (value === true) return "True";
    if (value === false) return "False";
    if (typeof value === "string") {
      const quote = value.includes("'") && !value.includes('"') ? '"' : "'";
      const text = value.replaceAll("\\", "\\\\").replaceAll("\n", "\\n");
      return quote + (quote === "'" ? text.replaceAll("'", "\\'") : text) + quote;
    }
    if (Array.isArray(value)) return `[${value.map(spell).join(", ")}]`;
    if (isObject(value)) return `{${Object.entries(value).map(([k, v]) => `${spell(k)}: ${spell(v)}`).join(", ")}}`;
    return `${value}`;
  }

  /** The fact as the config has it, null where it has none. */
  const get = (text, name) => (Object.hasOwn(text, name) && text[name] !== undefined ? text[name] : null);

  /** Python's idea of true: empty lists and objects are not. */
  function truthy(value) {
    if (Array.isArray(value)) return value.length > 0;
    if (isObject(value)) return Object.keys(value).length > 0;
    return Boolean(value);
  }

  const either = (...values) => values.find(truthy) ?? null;

  function atLeast(minimum, name, value) {
    if (!Number.isSafeInteger(value) || value < minimum) {
      throw new PlanError(`${name} = ${spell(value)}: an integer of at least ${minimum} is needed`);
    }
    return value;
  }

  /** The whole number under exactly this name; 0 if it is not declared. */
  function wholeNumber(text, name) {
    return get(text, name) === null ? 0 : atLeast(0, `config: ${name}`, text[name]);
  }

  /** The list (or the letters) under exactly this name; empty if it is not declared. */
  function listedValues(text, name) {
    const value = get(text, name) ?? [];
    if (!Array.isArray(value) && typeof value !== "string") {
      throw new PlanError(`config: ${name} = ${spell(value)}: a list is needed`);
    }
    return Array.from(value);
  }

  /** The fact under whichever of its names declares it; null if none does. */
  function findFact(text, what) {
    const name = data().NAMES[what].find((one) => get(text, one) !== null);
    return name === undefined ? null : wholeNumber(text, name);
  }

  function requiredFact(text, what) {
    const value = findFact(text, what);
    const names = data().NAMES[what];
    if (value === null) throw new PlanError(`config: ${names.join(" or ")} is missing and has no fallback`);
    return atLeast(1, `config: ${names[0]}`, value);
  }

  /** The part that describes the language model, with its class's own defaults filled in. */
  function textPart(config) {
    for (const name of data().TEXT_PARTS) {
      if (isObject(get(config, name))) {
        const dtype = either(get(config, "dtype"), get(config, "torch_dtype"));
        return textPart({ dtype, ...config[name] });
      }
    }
    if (truthy(get(config, "is_encoder_decoder"))) {
      throw new PlanError("config: is_encoder_decoder is true; only decoders are sized");
    }
    const attention = get(config, "attn_config");
    const nested = isObject(attention) ? { num_kv_heads: get(attention, "kv_n_heads") } : {};
    const given = Object.fromEntries(Object.entries(config).filter(([, value]) => value !== null));
    const kind = spellKind(get(config, "model_type"));
    const defaults = Object.hasOwn(data().CLASS_DEFAULTS, kind) ? data().CLASS_DEFAULTS[kind] : {};
    return { ...defaults, ...nested, ...given };
  }

  const spellKind = (kind) => (typeof kind === "string" ? kind : spell(kind));

  function headsPerRank(heads, kvHeads, ranks) {
    if (heads % ranks) throw new PlanError(`tensor_parallel = ${ranks}: it does not divide ${heads} query heads`);
    if (kvHeads % ranks && ranks % kvHeads) {
      throw new PlanError(`tensor_parallel = ${ranks}: ${kvHeads} KV heads do not go round evenly`);
    }
    return Math.max(1, Math.floor(kvHeads / ranks));
  }

  /** [KV heads a rank, head size, tensors] of one layer. */
  function layerShape(text, ranks) {
    const heads = requiredFact(text, "heads");
    const latent = findFact(text, "latent");
    if (latent) {
      headsPerRank(heads, 1, ranks);
      return [1, latent + requiredFact(text, "rope"), 1];
    }
    const oneHead = truthy(get(text, "multi_query")) && !truthy(get(text, "new_decoder_architecture"));
    const kvHeads = oneHead ? 1 : findFact(text, "kv_heads") || heads;
    let size = findFact(text, "head_size");
    if (size === null) {
      const hidden = requiredFact(text, "hidden");
      if (hidden % heads) {
        throw new PlanError(`config: no head_dim, and ${heads} heads do not divide ${hidden}`);
      }
      size = hidden / heads;
    }
    const kept = headsPerRank(heads, kvHeads, ranks);
    const valueSize = findFact(text, "value_size") || size;
    return valueSize === size ? [kept, size, 2] : [kept, size + valueSize, 1];
  }

  const indices = (layers) => Array.from({ length: layers }, (_, index) => index);
  const steps = (first, end, step) => indices(end).filter((index) => index >= first && (index - first) % step === 0);

  /** The kind of each layer where the config lists them, or says which ones attend; else nothing. */
  function listedKinds(text, layers) {
    for (const name of ["layer_types", "layers_block_type", "hybrid_override_pattern"]) {
      const names = listedValues(text, name);
      if (names.length) return names.map(spellKind);
    }
    const cycle = listedValues(text, "block_types");
    if (cycle.length) {
      const kinds = cycle.map((kind) => (kind === "attention" ? "sliding_attention" : spellKind(kind)));
      return indices(layers).map((index) => kinds[index % kinds.length]);
    }
    const attends = listedValues(text, "full_attn_idxs");
    if (!attends.length) attends.push(...listedValues(text, "attn_layer_indices"));
    listedValues(text, "attn_type_list").forEach((full, index) => {
      if (truthy(full)) attends.push(index);
    });
    const period = wholeNumber(text, "attn_layer_period");
    if (period) attends.push(...steps(wholeNumber(text, "attn_layer_offset"), layers, period));
    const interval = wholeNumber(text, "full_attention_interval");
    if (interval) attends.push(...steps(interval - 1, layers, interval));
    if (!attends.length) return [];
    return indices(layers).map((index) => (attends.includes(index) ? "full_attention" : "linear_attention"));
  }

  /** The kind of each layer from a window or chunk size and the family's rule; else all full. */
  function patternedKinds(text, layers) {
    if (findFact(text, "chunk")) {
      const listed = listedValues(text, "no_rope_layers");
      const chunked = listed.length ? listed : indices(layers).map((index) => (index + 1) % 4);
      return chunked.map((flag) => (truthy(flag) ? "chunked_attention" : "full_attention"));
    }
    if (!findFact(text, "window") || get(text, "use_sliding_window") === false) {
      return indices(layers).map(() => "full_attention");
    }
    const slides = slidingRule(text);
    return indices(layers).map((index) => (slides(index) ? "sliding_attention" : "full_attention"));
  }

  function slidingRule(text) {
    const pattern = get(text, "sliding_window_pattern");
    if (pattern && typeof pattern === "string") return (index) => pattern[index % pattern.length] === "L";
    const step = wholeNumber(text, "sliding_window_pattern");
    if (step) return (index) => (index + 1) % step !== 0;
    const first = truthy(get(text, "use_sliding_window")) ? wholeNumber(text, "max_window_layers") : 0;
    return (index) => index >= first;
  }

  function layerKinds(text) {
    let blocks = listedValues(text, "layers_block_type");
    if (!blocks.length) blocks = listedValues(text, "hybrid_override_pattern");
    const layers = findFact(text, "layers") || blocks.length || requiredFact(text, "layers");
    if (layers > MOST_LAYERS) throw new PlanError(`config: ${layers} layers are more than the ${MOST_LAYERS} shown here`);
    const listed = listedKinds(text, layers);
    const names = listed.length ? listed : patternedKinds(text, layers);
    if (names.length !== layers) throw new PlanError(`config: ${names.length} layer types for ${layers} layers`);
    const { KINDS } = data();
    const unknown = [...new Set(names.filter((name) => !Object.hasOwn(KINDS, name)))].sort();
    if (unknown.length) {
      const known = Object.keys(KINDS).join(", ");
      throw new PlanError(`config: layer type ${spell(unknown[0])} is unknown; known: ${known}`);
    }
    const last = layers - wholeNumber(text, "num_kv_shared_layers");
    const factor = (truthy(get(text, "use_cla")) ? wholeNumber(text, "cla_share_factor") : 1) || 1;
    return names.map((name, index) => (index < last && index % factor === 0 ? KINDS[name] : "none"));
  }

  /** [key of BITS, notes] from the reader's wish, else from the config. */
  function elementType(text, kvDtype) {
    const given = kvDtype || either(get(text, "dtype")) || get(text, "torch_dtype");
    if (given === null) return ["bf16", ["the config declares no dtype: 16 bits assumed"]];
    const name = spellKind(given).replace(/^torch\./, "");
    const { DTYPES, BITS } = data();
    if (!Object.hasOwn(DTYPES, name)) {
      const which = kvDtype ? "kv_dtype" : "config: dtype";
      throw new PlanError(`${which} = ${spell(name)}: one of ${Object.keys(BITS).join(", ")} is needed`);
    }
    return [DTYPES[name], []];
  }

  /** Facts that one layer declares for itself. */
  function layerOverrides(text, index, kind) {
    const listed = get(text, "per_layer_config");
    if (isObject(listed)) {
      const key = Object.keys(listed).find((one) => (one.replace(/^0+/, "") || "0") === `${index}`);
      return key === undefined ? {} : listed[key];
    }
    if (kind !== "full" || !truthy(get(text, "global_head_dim"))) return {};
    const heads = truthy(get(text, "attention_k_eq_v")) ? get(text, "num_global_key_value_heads") : null;
    return { head_dim: text.global_head_dim, ...(truthy(heads) ? { num_key_value_heads: heads } : {}) };
  }

  /** What one token leaves behind in a group of identical layers, in bits: may end inside a byte. */
  function checkSpec(spec) {
    for (const name of ["num_layers", "num_kv_heads", "head_size"]) atLeast(1, name, spec[name]);
    if ((spec.num_kv_heads * spec.head_size * data().BITS[spec.dtype]) % 8) {
      throw new PlanError(`head_size = ${spec.head_size}: ${spec.dtype} rows end inside a byte`);
    }
    return spec;
  }

  /** A model's KV cache: {groups, num_layers, max_tokens, tensor_parallel, notes}. */
  function fromConfig(config, { kvDtype = null, tensorParallel = 1, policy = "full" } = {}) {
    atLeast(1, "tensor_parallel", tensorParallel);
    if (policy !== "full" && policy !== "window") {
      throw new PlanError(`policy = ${spell(policy)}: "full" or "window" is needed`);
    }
    const text = textPart(config);
    const [dtype, notes] = elementType(text, kvDtype);
    const kinds = layerKinds(text);
    const shapes = new Map();
    kinds.forEach((kind, index) => {
      if (kind === "none") return;
      const shape = layerShape({ ...text, ...layerOverrides(text, index, kind) }, tensorParallel);
      const window = kind === "full" ? null : requiredFact(text, kind === "chunked" ? "chunk" : "window");
      const key = JSON.stringify([...shape, window]);
      shapes.set(key, (shapes.get(key) || 0) + 1);
    });
    if (!shapes.size) throw new PlanError("config: no layer keeps K/V");
    const groups = [...shapes].map(([key, count]) => {
      const [heads, size, tensors, window] = JSON.parse(key);
      return {
        spec: checkSpec({
          num_layers: count, num_kv_heads: heads, head_size: size, dtype, tensors_per_layer: tensors,
        }),
        window,
        policy: window ? policy : "full",
      };
    });
    const max = findFact(text, "context");
    return { groups, num_layers: kinds.length, max_tokens: max, tensor_parallel: tensorParallel, notes };
  }

  // ------------------------------------------------------------------ bytes

  const bytesPerToken = (kv) => kv.groups.reduce((sum, { spec }) => sum + specBytes(spec), 0n);

  function specBytes(spec) {
    const elements = [spec.tensors_per_layer, spec.num_layers, spec.num_kv_heads, spec.head_size];
    return (elements.reduce((product, one) => product * BigInt(one), 1n) * BigInt(data().BITS[spec.dtype])) / 8n;
  }

  const ceilDiv = (a, b) => (a + b - 1n) / b;
  const larger = (a, b) => (a > b ? a : b);

  /** Sum of ceil(n / B) for n = 1..m, 0 for a negative m. */
  function sumCeil(m, B) {
    if (m < 0n) return 0n;
    const [full, rest] = [m / B, m % B];
    return (B * full * (full + 1n)) / 2n + rest * (full + 1n);
  }

  /** Sum of floor(k / B) for k = 0..m, 0 for a negative m. */
  function sumFloor(m, B) {
    if (m < 0n) return 0n;
    const [full, rest] = [(m + 1n) / B, (m + 1n) % B];
    return (B * full * (full - 1n)) / 2n + rest * full;
  }

  /** Blocks of a group for one sequence of each length from low to high, all together. */
  function blocksBetween(group, low, high, B) {
    const all = sumCeil(high, B) - sumCeil(low - 1n, B);
    if (group.window === null || group.policy === "full") return all;
    const window = BigInt(group.window);
    return all - (sumFloor(high - window, B) - sumFloor(larger(low - 1n - window, -1n), B));
  }

  /** Bytes of the sequences of `lengths`, {count, ranges: [[low, high], ...]}, in blocks of B tokens. */
  function bytesForAll(kv, lengths, blockSize = 1) {
    const B = BigInt(blockSize);
    let bytes = 0n;
    for (const group of kv.groups) {
      const perBlock = specBytes(group.spec) * B;
      for (const [low, high] of lengths.ranges) {
        bytes += blocksBetween(group, BigInt(low), BigInt(high), B) * perBlock;
      }
    }
    return bytes;
  }

  const bytesFor = (kv, tokens, blockSize = 1) => bytesForAll(kv, { ranges: [[tokens, tokens]] }, blockSize);

  /** "1000", "100-2000" (all lengths alike likely) or "300, 1200, 2004": {count, ranges, tokens, longest}. */
  function parseLengths(text) {
    const parts = text.replaceAll(/(\d),(?=\d{3}(\D|$))/g, "$1").split(/[,;\s]+(?![-–\s])/).filter(Boolean);
    const ranges = parts.map((part) => {
      const found = part.match(/^(\d+)(?:\s*[-–]\s*(\d+))?$/);
      if (!found) throw new PlanError(`${spell(part)}: write 1000, or 100-2000, or 300, 1200, 2004`);
      const range = [Number(found[1]), Number(found[2] ?? found[1])];
      if (range[0] < 1 || range[1] < range[0]) throw new PlanError(`${spell(part)}: lengths start at 1 and go upwards`);
      return range;
    });
    if (!ranges.length) throw new PlanError("write 1000, or 100-2000, or 300, 1200, 2004");
    if (ranges.some(([, high]) => high > 1e9)) throw new PlanError("at most 1,000,000,000 tokens");
    const count = ranges.reduce((sum, [low, high]) => sum + high - low + 1, 0);
    const tokens = ranges.reduce((sum, [low, high]) => sum + (BigInt(low + high) * BigInt(high - low + 1)) / 2n, 0n);
    return { count, ranges, tokens, longest: Math.max(...ranges.map(([, high]) => high)) };
  }

  /** Read "80GB", "1.5 GiB" or "4096" as whole bytes (BigInt), rounded down. */
  function parseBytes(text) {
    const units = new Map();
    for (const [name, size] of [...Object.entries(data().BINARY_UNITS), ...Object.entries(data().DECIMAL_UNITS)]) {
      units.set(name.toLowerCase(), BigInt(size));
    }
    const found = text.match(/^\s*([0-9]+)(?:\.([0-9]+))?\s*([a-zA-Z]*)\s*$/);
    const unit = found ? found[3].toLowerCase() || "b" : "";
    if (!found || !units.has(unit)) {
      const allowed = [...Object.keys(data().BINARY_UNITS), ...Object.keys(data().DECIMAL_UNITS).slice(1)];
      throw new PlanError(`size = ${spell(text)}: write a number and one of ${allowed.join(", ")}`);
    }
    const decimals = found[2] ?? "";
    return (BigInt(found[1] + decimals) * units.get(unit)) / 10n ** BigInt(decimals.length);
  }

  /** x with `digits` decimals, exact ties to the even digit, as Python rounds. */
  function fixed(x, digits) {
    const exact = x.toFixed(60);
    const cut = exact.length - 60 + digits;
    if (!/^50*$/.test(exact.slice(cut))) return x.toFixed(digits);
    const low = exact.slice(0, cut).replace(/\.$/, "");
    return Number(low[low.length - 1]) % 2 ? x.toFixed(digits) : low;
  }

  const thousands = (text) => text.replace(/^\d+/, (whole) => whole.replace(/\B(?=(\d{3})+$)/g, ","));
  const count = (n) => thousands(`${n}`);

  /** A number of bytes in the largest unit that keeps it at 1 or more. */
  function formatBytes(bytes, digits = 2) {
    const number = Number(bytes);
    const fits = Object.entries(data().BINARY_UNITS).filter(([, size]) => number >= size);
    const [unit, size] = fits[fits.length - 1] ?? ["B", 1];
    const text = thousands(fixed(number / size, digits));
    return `${text.includes(".") ? text.replace(/\.?0+$/, "") : text} ${unit}`;
  }

  // ------------------------------------------------------------------ weights

  function countParameters(config) {
    const text = textPart(config);
    const kind = get(text, "model_type");
    if (typeof kind !== "string" || !Object.hasOwn(data().FAMILIES, kind)) {
      throw new PlanError(`weights: no formula for model_type ${spell(kind)}; give their size`);
    }
    const [matrices, tied] = data().FAMILIES[kind];
    const [hidden, layers, heads] = ["hidden", "layers", "heads"].map((what) => requiredFact(text, what));
    const [kvHeads, headSize] = layerShape(text, 1);
    const experts = findFact(text, "experts") || 1;
    const wide = experts > 1 ? wholeNumber(text, "moe_intermediate_size") : 0;
    const inner = wide || findFact(text, "mlp") || 4 * hidden;
    const attention = 2 * hidden * headSize * (heads + kvHeads);
    const mlp = matrices * hidden * inner * experts + (experts > 1 ? hidden * experts : 0);
    const embeddings = truthy(get(text, "tie_word_embeddings") ?? tied) ? 1 : 2;
    return layers * (attention + mlp) + embeddings * requiredFact(text, "vocabulary") * hidden;
  }

  /** Bytes of a model's weights, from its shapes. */
  function weightBytes(config) {
    if (truthy(get(config, "quantization_config"))) {
      throw new PlanError("weights: the config says they are quantised; give their size");
    }
    const [dtype] = elementType(textPart(config), null);
    return (BigInt(countParameters(config)) * BigInt(data().BITS[dtype])) / 8n;
  }

  // ------------------------------------------------------------------ the plan

  /** Users that fit one GPU's memory.  All bytes are BigInt, `share` a whole percentage. */
  function plan({ kv, memory, share, weights, maxTokens, lengths, blockSize }) {
    const usable = (memory * BigInt(share)) / 100n;
    const ownWeights = ceilDiv(weights, BigInt(kv.tensor_parallel));
    if (ownWeights >= usable) {
      throw new PlanError(
        `the weights take ${formatBytes(ownWeights)} of ${formatBytes(usable)}: nothing is left for K/V`, "weights",
      );
    }
    if (lengths.longest > maxTokens) {
      throw new PlanError(`${count(lengths.longest)} tokens exceed the context of ${count(maxTokens)}`, "lengths");
    }
    const many = BigInt(lengths.count);
    const forKV = usable - ownWeights;
    const reservedEach = bytesFor(kv, maxTokens);
    const held = bytesForAll(kv, lengths);
    const inBlocks = bytesForAll(kv, lengths, blockSize);
    return {
      usable, ownWeights, forKV, reservedEach, held, inBlocks,
      reserved: forKV / reservedEach,
      paged: (forKV * many) / inBlocks,
      reservedWaste: 1 - Number(held) / Number(many * reservedEach),
      pagedWaste: 1 - Number(held) / Number(inBlocks),
    };
  }

  const CapacityPlanner = {
    PlanError, fromConfig, bytesPerToken, bytesFor, bytesForAll, parseLengths, parseBytes, formatBytes,
    countParameters, weightBytes, plan,
  };
  Object.assign(window, { CapacityPlanner });

  // ------------------------------------------------------------------ the form

  const MARK = "#plan:";
  const PASTED = "pasted";
  const LONGEST_LINK = 6000;

  const FIELDS = {
    model: { label: "Model", otherwise: "llama-3-8b", options: () => [...Object.keys(data().MODELS), PASTED] },
    config: { label: "config.json, pasted", otherwise: "", hint: "the whole file, or the fields that matter", area: true },
    memory: { label: "Memory of one GPU", otherwise: "80 GB", hint: "such as 80 GB, 74.5 GiB, 24 GiB" },
    share: { label: "Share the server may use, %", otherwise: "90", hint: "the rest is for activations and the runtime" },
    weights: { label: "Weights of the model", otherwise: "", hint: "such as 16 GB; empty: from the shapes" },
    tp: { label: "GPUs in tensor parallel", otherwise: "1", hint: "each holds its share of heads and weights" },
    dtype: { label: "KV type", otherwise: "", options: () => ["", ...Object.keys(data().BITS)] },
    context: { label: "Context, tokens", otherwise: "", hint: "what a reservation is made for; empty: the model's" },
    lengths: {
      label: "Tokens a user holds", otherwise: "100-2000",
      hint: "1000, or 100-2000 (each length alike likely), or a list: 300, 1200, 2004",
    },
    block: { label: "Block size, tokens", otherwise: "16" },
    policy: { label: "Sliding layers keep", otherwise: "full", options: () => ["full", "window"] },
  };

  const OPTION_WORDS = { [PASTED]: "paste a config.json", "": "as the weights", full: "every token", window: "their window" };
  // Where an error of the arithmetic belongs.
  const BLAMED = [[/^tensor_parallel/, "tp"], [/^kv_dtype|rows end inside/, "dtype"], [/^weights/, "weights"]];

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

  class CapacityPlannerElement extends HTMLElement {
    connectedCallback() {
      if (this.built) return;
      this.built = true;
      this.number = made++;
      this.build();
      this.fill(this.fromAddress() ?? {});
      this.show();
      window.addEventListener("hashchange", () => {
        const values = this.fromAddress();
        if (values) {
          this.fill(values);
          this.show();
        }
      });
    }

    build() {
      this.inputs = {};
      this.errors = {};
      this.boxes = {};
      const form = make("form", { class: "pkw-fields", onsubmit: (event) => event.preventDefault() });
      for (const [name, { label, hint, options, area }] of Object.entries(FIELDS)) {
        const id = `pk-plan-${this.number}-${name}`;
        const changed = () => this.changed();
        const described = `${id}-error${hint ? ` ${id}-hint` : ""}`;
        const input = options
          ? make("select", { id, onchange: changed, "aria-describedby": described })
          : make(area ? "textarea" : "input", {
              id, oninput: changed, autocomplete: "off", spellcheck: "false", "aria-describedby": described,
            });
        for (const value of options ? options() : []) input.append(make("option", { value }, OPTION_WORDS[value] ?? value));
        this.inputs[name] = input;
        this.errors[name] = make("p", { class: "pkw-error", id: `${id}-error`, hidden: "" });
        this.boxes[name] = make(
          "div",
          { class: area ? "pkw-wide" : "" },
          make("label", { for: id }, label),
          input,
          this.errors[name],
          hint ? make("p", { class: "pkw-hint", id: `${id}-hint` }, hint) : "",
        );
        form.append(this.boxes[name]);
      }
      this.boxes.policy.hidden = true;
      this.headline = make("p", { class: "pkw-headline", role: "status", "aria-live": "polite" });
      this.notes = make("p", { class: "pkw-hint" });
      this.bars = make("div", { class: "pkw-bars" });
      this.formula = make("ul", { class: "pkw-formula" });
      this.answer = make("div", { class: "pkw-answer" }, this.headline, this.notes, this.bars, this.formula);
      this.replaceChildren(
        make("section", { class: "pkw pkw-plan", "aria-label": "How many users fit my GPU" }, form, this.answer),
      );
    }

    // ---- the address keeps the plan

    fromAddress() {
      if (this.number > 0 || !location.hash.startsWith(MARK)) return null;
      return Object.fromEntries(new URLSearchParams(location.hash.slice(MARK.length)));
    }

    fill(values) {
      for (const [name, { otherwise }] of Object.entries(FIELDS)) {
        const input = this.inputs[name];
        input.value = values[name] ?? otherwise;
        if (input.selectedIndex < 0) input.value = otherwise;
      }
    }

    changed() {
      this.show();
      if (this.number > 0) return;
      const kept = new URLSearchParams();
      for (const [name, { otherwise }] of Object.entries(FIELDS)) {
        let { value } = this.inputs[name];
        if (name === "config") value = this.shortConfig(value);
        if (value !== otherwise && !this.boxes[name].hidden) kept.set(name, value);
      }
      try {
        history.replaceState(history.state, "", `${MARK}${kept}`);
      } catch {
        // A page that may not change its address still plans.
      }
    }

    /** The pasted config without its blanks, nothing if it is too long for a link. */
    shortConfig(text) {
      try {
        const short = JSON.stringify(JSON.parse(text));
        return short.length > LONGEST_LINK ? "" : short;
      } catch {
        return "";
      }
    }

    // ---- from the fields to the plan

    /** Run `read`; an error is shown beside `name`, or beside the field that it blames. */
    attempt(name, read) {
      try {
        return read(this.inputs[name].value.trim());
      } catch (error) {
        if (!(error instanceof PlanError)) throw error;
        const blamed = BLAMED.find(([pattern]) => pattern.test(error.message));
        this.complaints[error.field ?? (blamed ? blamed[1] : name)] ??= error.message;
        return null;
      }
    }

    whole(text, low, high) {
      if (!/^\d+$/.test(text) || Number(text) < low || Number(text) > high) {
        throw new PlanError(`${spell(text)}: a whole number from ${count(low)} to ${count(high)} is needed`);
      }
      return Number(text);
    }

    config() {
      if (this.inputs.model.value !== PASTED) return data().MODELS[this.inputs.model.value];
      return this.attempt("config", (text) => {
        if (!text) throw new PlanError("paste the config.json of a model");
        let config;
        try {
          config = JSON.parse(text);
        } catch (error) {
          throw new PlanError(`this is not JSON: ${error.message}`);
        }
        if (!isObject(config)) throw new PlanError("a JSON object is needed, not a list or value");
        return config;
      });
    }

    read() {
      const config = this.config();
      const source = this.inputs.model.value === PASTED ? "config" : "model";
      const tensorParallel = this.attempt("tp", (text) => this.whole(text, 1, 1024));
      const blockSize = this.attempt("block", (text) => this.whole(text, 1, 65_536));
      const share = this.attempt("share", (text) => this.whole(text, 1, 100));
      const memory = this.attempt("memory", parseBytes);
      const lengths = this.attempt("lengths", parseLengths);
      const { value: kvDtype } = this.inputs.dtype;
      const { value: policy } = this.inputs.policy;
      if (!config || tensorParallel === null) return null;
      const kv = this.attempt(source, () => this.sized(config, { kvDtype: kvDtype || null, tensorParallel, policy }));
      if (!kv) return null;
      this.boxes.policy.hidden = !kv.groups.some(({ window }) => window !== null);
      const weights = this.attempt("weights", (text) => (text ? parseBytes(text) : weightBytes(config)));
      const maxTokens = this.attempt("context", (text) => {
        if (text) return this.whole(text.replaceAll(",", ""), 1, 1e9);
        if (kv.max_tokens) return kv.max_tokens;
        throw new PlanError("the config declares no context: give one");
      });
      if ([weights, maxTokens, blockSize, share, memory, lengths].includes(null)) return null;
      const asked = { kv, memory, share, weights, maxTokens, lengths, blockSize, named: this.inputs.weights.value !== "" };
      const planned = this.attempt("memory", () => plan(asked));
      return planned && { ...asked, ...planned };
    }

    /** A pasted file may hold anything: what is no number where one belongs is the file's fault. */
    sized(config, options) {
      try {
        return fromConfig(config, options);
      } catch (error) {
        if (error instanceof PlanError) throw error;
        throw new PlanError(`this config cannot be read: ${error.message}`);
      }
    }

    show() {
      this.complaints = {};
      this.boxes.config.hidden = this.inputs.model.value !== PASTED;
      const result = this.read();
      for (const name of Object.keys(FIELDS)) {
        const message = this.complaints[name];
        this.errors[name].hidden = !message;
        this.errors[name].textContent = message ?? "";
        if (message) this.inputs[name].setAttribute("aria-invalid", "true");
        else this.inputs[name].removeAttribute("aria-invalid");
      }
      for (const part of [this.notes, this.bars, this.formula]) part.hidden = !result;
      if (!result) {
        const wrong = Object.keys(this.complaints).map((name) => FIELDS[name].label);
        this.headline.textContent = `No plan yet. Look at: ${wrong.join("; ")}.`;
        return;
      }
      this.showHeadline(result);
      this.showBars(result);
      this.showFormula(result);
    }

    showHeadline({ reserved, paged, kv }) {
      const ratio = reserved > 0n ? ` That is ${fixed(Number(paged) / Number(reserved), 1)} times as many.` : "";
      const where = kv.tensor_parallel > 1 ? ` on ${kv.tensor_parallel} GPUs` : "";
      this.headline.textContent = `${count(paged)} users fit in blocks${where}, ${count(reserved)} with reservations.${ratio}`;
      this.notes.textContent = ["A statement about memory, not about speed.", ...kv.notes.map((note) => `Note: ${note}.`)].join(" ");
    }

    showBars(result) {
      const { memory, usable, ownWeights, forKV, held, inBlocks, lengths, reserved, paged, reservedEach } = result;
      const many = BigInt(lengths.count);
      const tokens = (users) => (users * held) / many;
      const bar = (title, whole, parts) => {
        const says = parts.map(([, word, bytes]) => `${word} ${formatBytes(bytes)}`).join(", ");
        const line = make("div", { class: "pkw-barline", role: "img", "aria-label": `${title}: ${says}` });
        for (const [look, , bytes] of parts) {
          const width = Number((bytes * 1_000_000n) / whole) / 10_000;
          line.append(make("span", { class: look ? `pkw-part-${look}` : "", style: `width:${width}%` }));
        }
        const legend = make("p", { class: "pkw-legend pkw-hint" });
        legend.append(
          ...parts.map(([look, word, bytes]) =>
            make("span", {}, make("i", { class: look ? `pkw-part-${look}` : "" }), `${word} ${formatBytes(bytes)}`),
          ),
        );
        return [make("p", {}, make("b", {}, title)), line, legend];
      };
      const split = (users, taken) => [
        ["used", "hold tokens", tokens(users)],
        ["wasted", "set aside, empty", taken - tokens(users)],
        ["", "left over", forKV - taken],
      ];
      this.bars.replaceChildren(
        ...bar("One GPU", memory, [
          ["weights", "weights", ownWeights], ["kv", "K/V", forKV], ["kept", "kept back", memory - usable],
        ]),
        ...bar(`K/V with reservations: ${count(reserved)} users`, forKV, split(reserved, reserved * reservedEach)),
        ...bar(`K/V in blocks: ${count(paged)} users`, forKV, split(paged, (paged * inBlocks) / many)),
      );
    }

    /** The reader's own words for a size, and the binary unit where they differ. */
    typed(name, bytes) {
      const words = this.inputs[name].value.trim();
      const ours = formatBytes(bytes);
      return words && words.replaceAll(" ", "") !== ours.replaceAll(" ", "") ? `${words} (${ours})` : ours;
    }

    showFormula(result) {
      const { kv, memory, share, weights, ownWeights, forKV, maxTokens, reservedEach, reserved } = result;
      const { lengths, blockSize, inBlocks, paged, reservedWaste, pagedWaste } = result;
      const lines = kv.groups.map(({ spec, window }) => {
        const tensors = spec.tensors_per_layer === 2 ? "2 (K and V)" : "1 (one tensor for both)";
        const look = window ? `, looking back ${count(window)} tokens` : "";
        return (
          `A token leaves ${tensors} × ${spec.num_layers} layers × ${spec.num_kv_heads} KV heads × ` +
          `${spec.head_size} elements × ${data().BITS[spec.dtype]} bits / 8 = ${count(specBytes(spec))} B ` +
          `(${formatBytes(specBytes(spec))})${kv.tensor_parallel > 1 ? " on each GPU" : ""}${look}.`
        );
      });
      if (kv.groups.length > 1) lines.push(`Together ${count(bytesPerToken(kv))} B (${formatBytes(bytesPerToken(kv))}).`);
      const ranks = kv.tensor_parallel > 1 ? ` / ${kv.tensor_parallel} GPUs` : "";
      lines.push(
        `For K/V: ${this.typed("memory", memory)} × ${share} % − weights ${this.typed("weights", weights)}${ranks}` +
          `${result.named ? "" : ", from the shapes,"} = ${formatBytes(forKV)}.`,
        `A reservation of ${count(maxTokens)} tokens takes ${formatBytes(reservedEach)}: ` +
          `${formatBytes(forKV)} / ${formatBytes(reservedEach)} = ${count(reserved)} users, rounded down. ` +
          `${fixed(100 * reservedWaste, 1)} % of it is empty.`,
      );
      const mean = Number(inBlocks) / lengths.count;
      const meanTokens = Number(lengths.tokens) / lengths.count;
      lines.push(
        `A user holds ${thousands(fixed(meanTokens, 1)).replace(/\.0$/, "")} tokens` +
          `${lengths.count > 1 ? " on average" : ""}, in blocks of ${blockSize} tokens ` +
          `(${formatBytes(bytesPerToken(kv) * BigInt(blockSize))} each) ${formatBytes(mean)}: ` +
          `${formatBytes(forKV)} / ${formatBytes(mean)} = ${count(paged)} users, rounded down. ` +
          `${fixed(100 * pagedWaste, 1)} % of it is empty.`,
      );
      if (ownWeights !== weights) lines.push(`Each GPU holds ${formatBytes(ownWeights)} of the weights.`);
      this.formula.replaceChildren(...lines.map((line) => make("li", {}, line)));
    }
  }

  const define = () => {
    if (!customElements.get("capacity-planner")) customElements.define("capacity-planner", CapacityPlannerElement);
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", define);
  else define();
})();
