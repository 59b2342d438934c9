"use strict";
// Everything that a rollout says goes through h() or textContent, so it is text and never markup.
(async () => {
  const $ = (id) => document.getElementById(id);
  const ROW = 54;
  const SEEN = 1, TRAINED = 2, LOW = 4, HIGH = 8, MASKED = 16, CUT = 32;
  const PLAIN_CONTEXT_TOKENS = 40000, FOLD = 2500;
  const PALETTE = ["59,130,246", "245,158,11", "16,185,129", "239,68,68", "139,92,246", "20,184,166", "236,72,153", "132,204,22"];
  const COLUMN = {logprob: "logprobs", ratio: "ratios", entropy: "entropies", advantage: "advantages", version: "versions", mask: "flags"};
  const COLOURS = [["none", "nothing"], ["logprob", "log-prob"], ["ratio", "ratio π/μ"], ["entropy", "entropy"],
    ["advantage", "advantage"], ["version", "policy version"], ["mask", "loss mask"]];
  const SORTS = {
    order: ["as listed", (r) => -r.place], received: ["time", (r) => r.received_at], step: ["step", (r) => r.step ?? r.trained?.step],
    reward: ["reward", (r) => r.reward], tokens: ["tokens", (r) => r.n_sampled], turns: ["turns", (r) => r.n_turns],
    seconds: ["seconds", (r) => r.seconds], version: ["version", (r) => r.versions?.[1]], entropy: ["entropy", (r) => r.entropy],
  };
  const NUMBERS = {
    reward: (r) => [r.reward], step: (r) => [r.step, ...r.replays], evaluation: (r) => [r.evaluation], turns: (r) => [r.n_turns], tokens: (r) => [r.n_sampled],
    seconds: (r) => [r.seconds], age: (r) => [r.age], entropy: (r) => [r.entropy], version: (r) => r.versions ?? [],
  };
  const WORDS = {
    id: (r) => r.trajectory_id, task: (r) => r.task_id, env: (r) => r.environment, environment: (r) => r.environment,
    actor: (r) => r.actor, status: (r) => `${r.status} ${r.state} ${r.reason}`, state: (r) => `${r.state} ${r.reason}`,
    failure: (r) => r.failure ? Object.values(r.failure).join(" ") : "", text: (r) => spoken(r),
  };

  const {about, rows} = await load($("data"));
  rows.forEach((r, i) => { r.place = i; r.trained = r.transcript?.trained; });
  const scales = measure(rows);
  const state = {shown: rows, picked: null, at: -1, tokens: [], colour: kept("colour", "logprob"), exact: false, sort: "order", down: true};

  async function load(element) {
    const text = element.textContent.trim();
    if (element.dataset.kind === "json") return JSON.parse(text);
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    element.textContent = "";
    return JSON.parse(await new Response(stream).text());
  }

  function h(tag, properties, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties ?? {})) {
      if (name === "class") element.className = value; else if (name === "data") Object.assign(element.dataset, value);
      else if (name === "style") Object.assign(element.style, value); else element[name] = value;
    }
    element.append(...children.filter((c) => c !== null && c !== undefined && c !== "").map((c) => typeof c === "string" ? visible(c) : c));
    return element;
  }

  /** Control characters, and those that turn the direction of what follows, as their code points. */
  function visible(text) {
    return text.replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g,
      (c) => `‹U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`);
  }

  function kept(name, otherwise) { try { return localStorage.getItem(`afterplay.${name}`) ?? otherwise; } catch { return otherwise; } }
  function keep(name, value) { try { localStorage.setItem(`afterplay.${name}`, value); } catch { /* private window */ } }

  function decoded(text) { try { return decodeURIComponent(text); } catch { return text; } }

  const short = (v) => v === null || v === undefined ? "–" : Number.isInteger(v) ? String(v) : Number(v.toPrecision(4)).toString();
  const seconds = (v) => v >= 100 ? `${Math.round(v)} s` : v >= 0.1 || v === 0 ? `${Number(v.toPrecision(2))} s` : `${Number((v * 1e3).toPrecision(2))} ms`;
  const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
  const spoken = (r) => r.words ??= (r.transcript?.turns ?? []).map((t) =>
    [...t.messages.map((m) => m.content), t.message.content].join("\n")).join("\n").toLowerCase();

  // --- scales: of the whole page, so that colours of two rollouts compare ---

  function measure(all) {
    const values = {ratio: [], entropy: [], advantage: []}, versions = new Set();
    for (const r of all) for (const turn of r.transcript?.turns ?? []) {
      const c = turn.completion;
      for (const v of c.versions) versions.add(v);
      for (const v of c.ratios ?? []) if (v !== null) values.ratio.push(Math.abs(Math.log(Math.max(v, 1e-9))));
      for (const v of c.entropies ?? []) if (v !== null) values.entropy.push(v);
      for (const v of c.advantages ?? []) if (v !== null) values.advantage.push(Math.abs(v));
    }
    const most = (list, least) => {
      if (!list.length) return null;
      const sorted = Float64Array.from(list).sort();
      return Math.max(least, sorted[Math.floor(0.98 * (sorted.length - 1))]);
    };
    return {logprob: 5, ratio: most(values.ratio, 0.02), entropy: most(values.entropy, 1e-3), advantage: most(values.advantage, 1e-6),
      versions: [...versions].sort((a, b) => a - b)};
  }

  const mix = (rgb, share) => `rgba(${rgb},${Math.max(0, Math.min(1, share)) * 0.82})`;

  function versionColour(version) {
    const i = scales.versions.indexOf(version), n = scales.versions.length;
    if (n <= PALETTE.length) return mix(PALETTE[i], 0.6);
    return `hsla(${220 - 220 * i / (n - 1)},75%,50%,.5)`;
  }

  function maskColour(flags) {
    if (!(flags & SEEN)) return null;
    if (flags & MASKED || !(flags & TRAINED)) return mix("239,68,68", 0.75);
    if (flags & (LOW | HIGH)) return mix("245,158,11", 0.75);
    return mix("16,185,129", 0.45);
  }

  /** Background of a sampled token; null: its value is not known. */
  function paint(colour, completion, i) {
    if (colour === "none") return "";
    const column = completion[COLUMN[colour]], value = column?.[i];
    if (value === null || value === undefined) return null;
    if (colour === "logprob") return mix("234,88,12", -value / scales.logprob);
    if (colour === "entropy") return mix("147,51,234", value / scales.entropy);
    if (colour === "version") return versionColour(value);
    if (colour === "mask") return maskColour(value);
    const size = colour === "ratio" ? Math.log(Math.max(value, 1e-9)) : value;
    const [up, down] = colour === "ratio" ? ["220,38,38", "37,99,235"] : ["22,163,74", "220,38,38"];
    return mix(size > 0 ? up : down, Math.abs(size) / scales[colour]);
  }

  function legend(colour) {
    const ramp = (from, to, ...stops) => [h("span", {}, from), h("span", {class: "ramp", style: {
      background: `linear-gradient(90deg, ${stops.join(", ")})`}}), h("span", {}, to)];
    const key = (text, background) => h("span", {class: "key"}, h("span", {class: background === null ? "swatch unknown" : "swatch",
      style: {background: background ?? ""}}), text);
    const range = (rgb) => [mix(rgb, 0), mix(rgb, 1)];
    if (colour === "logprob") return ramp("p = 1", `p ≤ ${Math.exp(-scales.logprob).toFixed(3)}`, ...range("234,88,12"));
    if (colour === "ratio") return ramp(`≤ ${short(Math.exp(-scales.ratio))}`, `≥ ${short(Math.exp(scales.ratio))}`,
      mix("37,99,235", 1), mix("37,99,235", 0), mix("220,38,38", 1)).concat(h("span", {}, "more likely now than when sampled: red"));
    if (colour === "entropy") return ramp("0", `≥ ${short(scales.entropy)} nats`, ...range("147,51,234"));
    if (colour === "advantage") return ramp(`≤ −${short(scales.advantage)}`, `≥ ${short(scales.advantage)}`,
      mix("220,38,38", 1), mix("220,38,38", 0), mix("22,163,74", 1));
    if (colour === "version") {
      const many = scales.versions.length > PALETTE.length;
      if (many) return ramp(`version ${scales.versions[0]}`, `version ${scales.versions.at(-1)}`,
        ...[0, .25, .5, .75, 1].map((x) => `hsla(${220 - 220 * x},75%,50%,.5)`));
      return scales.versions.map((v) => key(`version ${v}`, versionColour(v)));
    }
    if (colour === "mask") return [key("trained", mix("16,185,129", 0.45)), key("clipped", mix("245,158,11", 0.75)),
      key("rejected", mix("239,68,68", 0.75)), key("not in the update", null), h("span", {}, "grey cards: context, never trained")];
    return [h("span", {}, "green: sampled by the policy")];
  }

  // --- the list ---

  /** A predicate of one word of the filter; null where it is not understood. */
  function term(word) {
    const match = /^(-?)([a-z]+)(:|>=|<=|>|<|=)(.*)$/i.exec(word);
    const name = match?.[2].toLowerCase();
    if (match && name in NUMBERS) {
      const [, not, , operator, text] = match;
      const range = /^(-?[\d.]+)?(?:\.\.|-)?(-?[\d.]+)?$/.exec(text);
      if (text === "" || !range) return null;
      let test;
      if (operator === ":" || operator === "=") {
        const span = /^(-?[\d.]+)(?:\.\.|-)(-?[\d.]+)$/.exec(text);
        const [low, high] = span ? [Number(span[1]), Number(span[2])] : [Number(text), Number(text)];
        if (Number.isNaN(low) || Number.isNaN(high)) return null;
        // versions are a range themselves
        test = (r) => name === "version" ? r.versions !== null && r.versions[0] <= high && r.versions[1] >= low
          : NUMBERS[name](r).some((v) => v !== null && v !== undefined && v >= low && v <= high);
      } else {
        const bound = Number(text);
        if (Number.isNaN(bound)) return null;
        const compare = {">": (v) => v > bound, "<": (v) => v < bound, ">=": (v) => v >= bound, "<=": (v) => v <= bound}[operator];
        test = (r) => NUMBERS[name](r).some((v) => v !== null && v !== undefined && compare(v));
      }
      return not ? (r) => !test(r) : test;
    }
    if (match && name in WORDS && match[3] === ":") {
      const wanted = match[4].toLowerCase();
      return (r) => WORDS[name](r).toLowerCase().includes(wanted) !== Boolean(match[1]);
    }
    const not = word.length > 1 && word.startsWith("-"), wanted = (not ? word.slice(1) : word).toLowerCase();
    if (wanted === "replayed") return (r) => (r.replays.length > 0) !== not;
    if (wanted === "learner") return (r) => Boolean(r.trained) !== not;
    if (wanted === "failed") return (r) => Boolean(r.failure) !== not;
    return (r) => (["id", "task", "env", "status", "failure"].some((k) => WORDS[k](r).toLowerCase().includes(wanted)) ||
      spoken(r).includes(wanted)) !== not;
  }

  function filter() {
    const words = $("filter").value.match(/(?:[^\s"]|"[^"]*"?)+/g) ?? [], terms = words.map((word) => term(word.replaceAll('"', "")));
    $("filter").classList.toggle("wrong", terms.includes(null));
    const good = terms.filter((t) => t !== null), value = SORTS[state.sort][1], sign = state.down ? -1 : 1;
    state.shown = rows.filter((r) => good.every((t) => t(r))).sort((a, b) => {
      const x = value(a) ?? null, y = value(b) ?? null;
      if (x === null || y === null) return (x === null) - (y === null) || a.place - b.place;
      return sign * (x - y) || a.place - b.place;
    });
    $("direction").textContent = state.down ? "↓" : "↑";
    $("count").textContent = state.shown.length === rows.length ? `${rows.length}${about.count > rows.length ? ` of ${about.count}` : ""}`
      : `${state.shown.length} of ${rows.length}`;
    $("rows").style.height = `${state.shown.length * ROW}px`;
    drawRows();
    if (!state.shown.includes(state.picked)) pick(state.shown[0] ?? null);
  }

  function drawRows() {
    const list = $("list"), first = Math.max(0, Math.floor(list.scrollTop / ROW) - 4);
    const last = Math.min(state.shown.length, Math.ceil((list.scrollTop + (list.clientHeight || 600)) / ROW) + 4);
    $("rows").replaceChildren(...state.shown.slice(first, last).map((r, i) => row(r, first + i)));
  }

  function row(r, i) {
    const picked = r === state.picked;
    const step = r.step !== null ? `step ${r.step}` : r.trained ? `step ${r.trained.step}` : r.state;
    return h("div", {class: picked ? "row picked" : "row", role: "option", ariaSelected: String(picked), style: {top: `${i * ROW}px`},
      onclick: () => { pick(r); $("main").focus({preventScroll: true}); }},
      h("div", {class: "top"}, h("span", {class: "name"}, r.task_id || r.trajectory_id), rewardOf(r, "push")),
      h("div", {class: "low"}, h("span", {class: "id"}, r.trajectory_id), h("span", {}, step), r.replays.length ? h("span", {}, `↻ ${r.replays.length}`) : "",
        r.status === "complete" ? "" : h("span", {class: r.status}, r.status),
        h("span", {class: "push"}, `${r.n_turns}× ${r.n_sampled} tok`), r.trained ? h("span", {class: "dot", title: "with values of the learner"}, "●") : ""));
  }

  const rewardOf = (r, more) => r.reward === null ? h("span", {class: `reward none ${more}`}, r.failure ? "failed" : "no reward")
    : h("span", {class: `reward ${r.reward > 0 ? "up" : ""} ${more}`}, short(r.reward));

  function move(by) {
    const i = state.shown.indexOf(state.picked), next = state.shown[Math.max(0, Math.min(state.shown.length - 1, i + by))];
    if (!next) return;
    pick(next);
    const list = $("list"), top = state.shown.indexOf(next) * ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
    drawRows();
  }

  function pick(r) {
    state.picked = r;
    $("main").scrollTop = 0;
    if (r) history.replaceState(null, "", `#${encodeURIComponent(r.trajectory_id)}`);
    drawRows();
    draw();
  }

  // --- one rollout ---

  function draw() {
    const r = state.picked, place = $("rollout");
    state.tokens = [];
    state.at = -1;
    hideTip();
    if (!r) { place.replaceChildren(h("p", {class: "empty"}, "No rollout fits the filter.")); recolour(); return; }
    const parts = [h("h2", {}, r.trajectory_id), h("p", {class: "lead"}, lead(r)), facts(r)];
    if (r.failure) parts.push(failure(r.failure));
    if (!r.transcript) parts.push(h("p", {class: "empty"}, r.missing));
    else {
      const plainContext = r.n_tokens > PLAIN_CONTEXT_TOKENS;
      let branch = 0;
      r.transcript.turns.forEach((turn, number) => {
        if (turn.branch !== branch) {
          branch = turn.branch;
          parts.push(h("div", {class: "branch"}, `Branch ${branch}: the chat template could not go on without changing earlier tokens, ` +
            "so the whole prompt begins again. What was sampled before is context here."));
        }
        parts.push(...turnCards(r, turn, number, plainContext));
      });
    }
    place.replaceChildren(...parts);
    recolour();
  }

  function lead(r) {
    const became = r.state === "trained" ? `trained in step ${r.step}` : `${r.state}${r.reason ? ` (${r.reason})` : ""}`;
    const replays = r.replays.length ? `, replayed in step ${r.replays.join(", ")}` : "";
    return `${r.environment} · ${r.task_id} · ${r.status}, ${became}${replays}`;
  }

  function facts(r) {
    const t = r.transcript, items = [["reward", short(r.reward)]];
    for (const [name, value] of Object.entries(r.rewards)) items.push([`reward: ${name}`, short(value)]);
    items.push(["turns", String(r.n_turns)], ["tokens", `${r.n_sampled} sampled of ${r.n_tokens}`]);
    if (r.versions) items.push(["policy versions", r.versions[0] === r.versions[1] ? r.versions[0] : `${r.versions[0]} to ${r.versions[1]}`]);
    const mean = (name, f) => {
      const all = (t?.turns ?? []).flatMap((turn) => turn.completion[name] ?? []).filter((v) => v !== null);
      return all.length ? short(f(all.reduce((a, b) => a + b, 0) / all.length)) : null;
    };
    if (t) {
      items.push(["mean log-prob", mean("logprobs", (v) => v)], ["mean ratio", mean("ratios", (v) => v)],
        ["mean entropy", mean("entropies", (v) => v)], ["mean advantage", mean("advantages", (v) => v)],
        ["time", `${seconds(r.seconds)}: engine ${seconds(t.timings.generate_seconds)}, environment ${seconds(t.timings.environment_seconds)}`],
        ["engine", `${t.engine.backend} ${t.engine.model}`], ["temperature", [...new Set(t.turns.map((turn) => short(turn.temperature)))].join(", ")],
        ["seed", t.seed]);
      if (t.trained) items.push(["seen by the learner", `step ${t.trained.step}, version ${t.trained.policy_version}${t.trained.replayed ? ", replayed" : ""}`]);
      if (t.lessons.length) items.push(["lessons", t.lessons.join(", ")]);
      if (Object.keys(t.payload).length) items.push(["task payload", JSON.stringify(t.payload).slice(0, 300)]);
    } else items.push(["time", seconds(r.seconds)]);
    items.push(["actor", r.actor], ["received", new Date(r.received_at * 1000).toLocaleString()]);
    return h("dl", {}, ...items.filter(([, v]) => v !== null).map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, String(v)))));
  }

  const failure = (f) => h("section", {class: "failure"}, h("h3", {}, `Failed in ${f.boundary}: ${f.kind}`), h("div", {}, f.message),
    f.details ? h("details", {}, h("summary", {}, "traceback"), h("pre", {}, f.details)) : "");

  function turnCards(r, turn, number, plainContext) {
    const cards = [];
    if (state.exact) {
      const body = h("div", {class: "text"});
      if (plainContext) body.append(visible(turn.context.texts.join("")));
      else turn.context.texts.forEach((_, i) => body.append(token(turn.context, i, {turn, number, i, context: true})));
      const n = turn.context.ids.length;
      cards.push(card("context", "context", [count(n, "token")], folded(body, n * 4)));
    } else {
      if (turn.template) cards.push(card("context", "chat template", [], folded(h("div", {class: "text"}, turn.template), turn.template.length)));
      for (const m of turn.messages) cards.push(card("context", m.role, [], folded(h("div", {class: "text"}, m.content), m.content.length), extra(m)));
    }
    const notes = [`turn ${number + 1}`, `${count(turn.tokens ?? turn.completion.ids.length, "token")}, ${turn.finish === "length" ? "cut off" : turn.finish}`];
    if (turn.reward !== null) notes.push(`reward ${short(turn.reward)}`);
    for (const [name, value] of Object.entries(turn.signals)) notes.push(`${name} ${short(value)}`);
    const body = h("div", {class: "text"});
    turn.completion.texts.forEach((_, i) => body.append(token(turn.completion, i, {turn, number, i, context: false})));
    cards.push(card("sampled", turn.message.role, notes, body, extra(turn.message)));
    return cards;
  }

  const card = (kind, role, notes, ...body) => h("div", {class: `message ${kind}`},
    h("div", {class: "head"}, h("b", {}, role), ...notes.map((note) => h("span", {}, note))), h("div", {class: "body"}, ...body));
  const extra = (m) => m.extra ? h("div", {class: "text extra"}, JSON.stringify(m.extra, null, 1)) : "";
  const folded = (body, size) => size <= FOLD ? body : h("details", {}, h("summary", {}, `${size.toLocaleString()} characters`), body);

  function token(side, i, where) {
    const part = side.parts[i], text = side.texts[i];
    const shown = text === "" ? `‹${part ?? ""}›` : state.exact ? text.replaceAll("\n", "↵\n") : text;
    const element = h("span", {class: "t"}, shown);
    if (text === "" && part) element.classList.add("part");
    if (side.special.includes(i)) element.classList.add("special");
    element.dataset.n = state.tokens.length;
    state.tokens.push({...where, side, element});
    return element;
  }

  function recolour() {
    const r = state.picked, wanted = state.colour, turns = r?.transcript?.turns ?? [];
    const has = (colour) => colour === "none" || turns.some((t) => t.completion[COLUMN[colour]]?.some((v) => v !== null));
    for (const option of $("colour").options) option.disabled = turns.length > 0 && !has(option.value);
    const known = has(wanted), colour = known ? wanted : "none";
    $("rollout").className = `${colour === "none" ? "plain" : ""} ${state.exact ? "exact" : ""}`;
    for (const t of state.tokens) {
      if (t.context) continue;
      const background = paint(colour, t.side, t.i);
      t.element.classList.toggle("unknown", background === null);
      t.element.style.background = background ?? "";
    }
    $("legend").replaceChildren(...legend(colour));
    const notice = $("notice"), name = COLOURS.find(([k]) => k === wanted)[1];
    notice.hidden = known || !turns.length || about.messages;
    notice.textContent = !r || known ? "" : wanted === "logprob" ? "Log-probabilities of this rollout were not recorded: it is a demonstration."
      : wanted === "ratio" && r.transcript?.trained ? "There is no ratio: log-probabilities of this rollout were not recorded when it was sampled."
      : `No ${name} was recorded for this rollout. The learner keeps it for ${about.traces_trained} trajectories of every update (traces.trained); those have a ● in the list.`;
    strip(colour);
  }

  function strip(colour) {
    const canvas = $("strip"), sampled = state.tokens.filter((t) => !t.context);
    canvas.hidden = sampled.length < 40 || colour === "none";
    if (canvas.hidden) return;
    canvas.style.width = `min(100%, ${sampled.length * 12}px)`;
    const width = canvas.width = Math.max(200, Math.floor(canvas.clientWidth * (window.devicePixelRatio || 1)));
    const pen = canvas.getContext("2d"), n = sampled.length;
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--card");
    pen.fillRect(0, 0, width, canvas.height);
    sampled.forEach((t, i) => {
      const background = paint(colour, t.side, t.i);
      if (!background) return;
      pen.fillStyle = background;
      pen.fillRect(Math.floor(i * width / n), 0, Math.max(1, Math.ceil(width / n)), canvas.height);
    });
    canvas.onclick = (event) => {
      const t = sampled[Math.min(n - 1, Math.floor(event.offsetX / canvas.clientWidth * n))];
      goTo(state.tokens.indexOf(t), true);
    };
  }

  // --- one token ---

  function goTo(index, scroll) {
    if (index < 0 || index >= state.tokens.length) return;
    state.tokens[state.at]?.element.classList.remove("at");
    state.at = index;
    const element = state.tokens[index].element;
    element.classList.add("at");
    element.closest("details")?.setAttribute("open", "");
    if (scroll) element.scrollIntoView({block: "center"});
    showTip(state.tokens[index], element.getBoundingClientRect());
  }

  function showTip(t, box) {
    if (about.messages) return;  // a part is a whole message
    const s = t.side, i = t.i, lines = [["token id", s.ids[i]], ["place", `turn ${t.number + 1}, ${t.context ? "context" : "sampled"} ${i + 1} of ${s.ids.length}`]];
    if (s.parts[i]) lines.push(["bytes", s.parts[i]]);
    if (!t.context) {
      const c = t.turn.completion, value = (name) => c[name]?.[i] ?? null, logprob = value("logprobs"), ratio = value("ratios");
      if (logprob !== null) lines.push(["log μ", `${short(logprob)}   p = ${Math.exp(logprob).toPrecision(3)}`]);
      else lines.push(["log μ", "not recorded"]);
      if (ratio !== null) lines.push(["ratio π/μ", short(ratio)], ["log π", short(logprob + Math.log(ratio))]);
      if (value("entropies") !== null) lines.push(["entropy", `${short(value("entropies"))} nats`]);
      if (value("advantages") !== null) lines.push(["advantage", short(value("advantages"))]);
      if (c.flags) lines.push(["loss", describe(value("flags"))]);
      else lines.push(["learner", "kept nothing of this rollout"]);
      lines.push(["version", value("versions")]);
    }
    const text = s.texts[i] === "" ? `‹${s.parts[i] ?? ""}›` : JSON.stringify(s.texts[i]);
    $("tip").replaceChildren(h("div", {class: "what"}, text), h("table", {}, h("tbody", {}, ...lines.map(([k, v]) => h("tr", {}, h("td", {}, k), h("td", {}, String(v)))))));
    const tip = $("tip");
    tip.hidden = false;
    const below = box.bottom + 8 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(8, Math.min(innerWidth - tip.offsetWidth - 8, box.left))}px`;
    tip.style.top = `${below ? box.bottom + 8 : Math.max(8, box.top - tip.offsetHeight - 8)}px`;
  }

  const hideTip = () => { $("tip").hidden = true; };

  function describe(flags) {
    if (!(flags & SEEN)) return "not in the update";
    const words = [flags & TRAINED ? "trained" : "rejected"];
    if (flags & MASKED) words.push("masked");
    if (flags & LOW) words.push("clipped low");
    if (flags & HIGH) words.push("clipped high");
    if (flags & CUT) words.push("weight cut at its maximum");
    return words.join(", ");
  }

  // --- controls ---

  function theme(value) {
    document.documentElement.dataset.theme = value;
    keep("theme", value);
    if (state.picked) recolour();
  }

  function setColour(value) { state.colour = value; $("colour").value = value; keep("colour", value); recolour(); }
  function setExact(value) { state.exact = value; $("exact").checked = value; draw(); }
  function flip() { theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); }

  const KEYS = {
    j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1), Home: () => move(-1e9), End: () => move(1e9),
    ArrowRight: () => goTo(state.at + 1, true), ArrowLeft: () => goTo(state.at - 1, true), x: () => setExact(!state.exact), d: flip,
    "/": () => { $("filter").focus(); $("filter").select(); }, Escape: () => { hideTip(); },
    c: () => {
      const free = [...$("colour").options].filter((o) => !o.disabled).map((o) => o.value);
      setColour(free[(free.indexOf($("colour").value) + 1) % free.length]);
    },
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (/^(INPUT|SELECT)$/.test(event.target.tagName) && event.target.type !== "checkbox") {
      if (event.key === "Escape" || (event.key === "Enter" && event.target.id === "filter")) event.target.blur();
      return;
    }
    if (KEYS[event.key]) { event.preventDefault(); KEYS[event.key](); }
  });
  $("rollout").addEventListener("mouseover", (event) => {
    const element = event.target.closest?.(".t");
    if (element) showTip(state.tokens[Number(element.dataset.n)], element.getBoundingClientRect()); else hideTip();
  });
  $("rollout").addEventListener("mouseleave", hideTip);
  $("rollout").addEventListener("click", (event) => {
    const element = event.target.closest?.(".t");
    if (element) goTo(Number(element.dataset.n), false);
  });
  $("main").addEventListener("scroll", hideTip);
  $("list").addEventListener("scroll", drawRows);
  window.addEventListener("resize", () => { drawRows(); recolour(); });
  $("filter").addEventListener("input", filter);
  $("sort").append(...Object.entries(SORTS).map(([value, [text]]) => h("option", {value}, text)));
  $("sort").addEventListener("change", () => { state.sort = $("sort").value; filter(); });
  $("direction").addEventListener("click", () => { state.down = !state.down; filter(); });
  $("colour").append(...COLOURS.map(([value, text]) => h("option", {value}, text)));
  $("colour").addEventListener("change", () => setColour($("colour").value));
  $("exact").addEventListener("change", () => setExact($("exact").checked));
  $("theme").addEventListener("click", flip);

  document.documentElement.dataset.theme = kept("theme", matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  $("run").textContent = about.run;
  $("run").title = [`written ${new Date(about.made_at * 1000).toLocaleString()}`, ...about.notes].join("\n");
  $("replay").textContent = about.replay ?? "";
  $("replay").hidden = !about.replay;
  if (!COLOURS.some(([k]) => k === state.colour)) state.colour = "logprob";
  $("colour").value = state.colour;
  const options = new URLSearchParams(location.search), asked = decoded(location.hash.slice(1));
  if (options.has("colour") && COLOURS.some(([k]) => k === options.get("colour"))) state.colour = $("colour").value = options.get("colour");
  if (options.has("theme")) document.documentElement.dataset.theme = options.get("theme") === "dark" ? "dark" : "light";
  if (options.has("exact")) state.exact = $("exact").checked = true;
  if (options.has("filter")) $("filter").value = options.get("filter");
  state.picked = rows.find((r) => r.trajectory_id === asked) ?? rows.find((r) => r.transcript?.trained)
    ?? rows.find((r) => r.transcript && r.state === "trained") ?? rows.find((r) => r.transcript && !r.failure)
    ?? rows.find((r) => r.transcript?.turns.length) ?? null;
  filter();
  if (state.picked) { drawRows(); draw(); }
  document.body.dataset.ready = String(rows.length);
})().catch((error) => {
  const place = document.getElementById("rollout");
  place.textContent = `This page could not be shown: ${error}. It needs a browser of 2023 or later (DecompressionStream).`;
});
