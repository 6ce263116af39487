// Reading a chart by pointer or arrow keys, and looking at a part of it: drag over it, or press + and -.

const SHORTEST_DRAG = 8; // pixels; less is a click

// Move the shared cursor by pointer or arrow keys, over the steps of the chart's longest line.
function followPointerAndKeys(picture, currentSpec, currentScale) {
  const longest = () => currentSpec().series.reduce((a, b) => (b.steps.length > a.steps.length ? b : a)).steps;
  const openStep = () => {
    const spec = currentSpec();
    if (spec.openStep && cursor.step !== null) spec.openStep(spec.axis ? spec.axis.stepAt(cursor.step) : cursor.step);
  };
  const stepAt = (event) => {
    const scale = currentScale();
    return Math.min(Math.max(scale.step(event.clientX - picture.getBoundingClientRect().left), scale.first), scale.last);
  };
  const dragged = listenToDrag(picture, currentSpec, currentScale, stepAt);
  picture.addEventListener("pointermove", (event) => {
    if (!currentScale()) return;
    const steps = longest();
    cursor.set(steps[nearestIndex(steps, stepAt(event))]);
  });
  picture.addEventListener("pointerleave", () => cursor.set(null));
  picture.addEventListener("blur", () => cursor.set(null));
  picture.addEventListener("click", () => { if (!dragged()) openStep(); });
  picture.addEventListener("keydown", (event) => {
    const steps = longest();
    const at = cursor.step === null ? steps.length : nearestIndex(steps, cursor.step);
    const jump = event.shiftKey ? Math.ceil(steps.length / 20) : 1;
    const goal = { ArrowLeft: at - jump, ArrowRight: at + jump, Home: 0, End: steps.length - 1 }[event.key];
    if (goal !== undefined) cursor.set(steps[Math.min(Math.max(goal, 0), steps.length - 1)]);
    else if (event.key === "Enter") openStep();
    else if (event.key === "Escape") cursor.set(null);
    else if (!zoomByKey(event.key, currentSpec(), currentScale())) return;
    event.preventDefault();
  });
}

// Half or twice the steps in view, around the cursor; 0 shows the whole run.
function zoomByKey(key, spec, scale) {
  const factor = { "+": 0.5, "=": 0.5, "-": 2, 0: 0 }[key];
  if (factor === undefined || !spec.zoom || !scale) return false;
  const width = (scale.last - scale.first) * factor;
  const middle = cursor.step === null ? scale.last - width / 2 : cursor.step;
  spec.zoom(factor ? [middle - width / 2, middle + width / 2] : null);
  return true;
}

// Have a drag over a chart zoom; returns whether the last press was one.
function listenToDrag(picture, currentSpec, currentScale, stepAt) {
  let start = null;
  let marked = null;
  let wasDrag = false;
  const end = () => { start = null; marked?.remove(); marked = null; };
  picture.addEventListener("pointerdown", (event) => {
    wasDrag = false;
    if (event.button === 0 && currentSpec().zoom && currentScale()) start = { x: event.clientX, step: stepAt(event) };
  });
  picture.addEventListener("pointermove", (event) => {
    if (!start || Math.abs(event.clientX - start.x) < SHORTEST_DRAG) return;
    const scale = currentScale();
    const [a, b] = [scale.x(start.step), scale.x(stepAt(event))];
    if (!marked) marked = svg("rect", { class: "selected-range", y: MARGIN.top, height: CHART_HEIGHT - MARGIN.top - MARGIN.bottom });
    if (!marked.isConnected) picture.append(marked);
    marked.setAttribute("x", Math.min(a, b));
    marked.setAttribute("width", Math.abs(b - a));
    wasDrag = true;
  });
  picture.addEventListener("pointerup", (event) => {
    const from = start;
    end();
    if (from && wasDrag) currentSpec().zoom([from.step, stepAt(event)]);
  });
  picture.addEventListener("pointerleave", end);
  return () => wasDrag;
}

// The steps of a zoom in order, whole and at least two.
function wholeRange([a, b]) {
  const first = Math.max(Math.floor(Math.min(a, b)), 0);
  return [first, Math.max(Math.ceil(Math.max(a, b)), first + 1)];
}

// A run or a group with its curves cut to a range of steps: as exact as its curves are.
function cutCurves(owner, [first, last]) {
  const cut = (encoded) => {
    const curve = decodeCurve(encoded);
    const inside = Array.from(curve.steps, (step, n) => [step, n]).filter(([step]) => step >= first && step <= last).map(([, n]) => n);
    return Object.fromEntries(Object.entries(curve).map(([key, values]) => [key, inside.map((n) => values[n])]));
  };
  const curves = Object.entries(owner.curves).map(([name, curve]) => [name, cut(curve)]).filter(([, curve]) => curve.steps.length);
  return withCurves(owner, Object.fromEntries(curves));
}

// A run or a group with the curves of a part of it; what is over all steps is left out.
function withCurves(owner, curves) {
  const control = owner.control && { ...owner.control, outcome: null, critical: null };
  return { ...owner, curves, axes: {}, token_statistics: null, control };
}
