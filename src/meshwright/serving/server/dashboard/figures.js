"use strict";
// Figures of the time between two documents of /status, independent of the page.
const Dashboard = {};
Dashboard.figures = (() => {
  const REASONS = ["late", "full", "crowded", "sacrificed", "cancelled", "failed", "lost"];

  // The least latency of a bucket, in seconds: four buckets to each doubling, from 1 ns on.
  const bucketBegin = (bucket) => ((4 + (bucket % 4)) * 2 ** Math.floor(bucket / 4)) / 4e9;

  const sum = (counts) => Object.values(counts).reduce((total, count) => total + count, 0);

  // Increases of counts, by key; null if one is less than before: a process was restarted.
  function grown(before, after) {
    const found = {};
    for (const key of new Set([...Object.keys(before), ...Object.keys(after)])) {
      const more = (after[key] || 0) - (before[key] || 0);
      if (more < 0) return null;
      if (more > 0) found[key] = more;
    }
    return found;
  }

  // The latency that this share of the counted answers does not exceed; null without any.
  function percentile(buckets, share) {
    const places = Object.keys(buckets).map(Number).sort((a, b) => a - b);
    let left = share * sum(buckets);
    for (const place of places) {
      const count = buckets[place];
      if (left <= count) {
        const [begin, end] = [bucketBegin(place), bucketBegin(place + 1)];
        return begin + (end - begin) * (left / count);
      }
      left -= count;
    }
    return null;
  }

  // The sums of counts, or null if some are unknown.
  function joined(many) {
    const all = {};
    for (const counts of many) {
      if (!counts) return null;
      for (const [key, count] of Object.entries(counts)) all[key] = (all[key] || 0) + count;
    }
    return all;
  }

  function figuresOf({ statuses, fates, buckets, batches }, answersS, samplesS) {
    const known = fates && samplesS > 0;
    const told = fates ? sum(fates) : 0;
    return {
      requests_per_s: statuses && answersS > 0 ? sum(statuses) / answersS : null,
      in_time_share: known && told ? (fates.done || 0) / told : null,
      p50_s: buckets ? percentile(buckets, 0.5) : null,
      p99_s: buckets ? percentile(buckets, 0.99) : null,
      mean_batch: known && batches > 0 ? ((fates.done || 0) + (fates.failed || 0)) / batches : null,
      batches_per_s: known && batches !== null ? batches / samplesS : null,
      drops: known ? REASONS.filter((name) => fates[name]).map((name) => [name, fates[name] / samplesS]) : [],
    };
  }

  function changes(before, after) {
    const batches = after.num_batches - before.num_batches;
    return {
      statuses: grown(before.statuses, after.statuses),
      fates: grown(before.fates, after.fates),
      buckets: grown(before.buckets, after.buckets),
      batches: batches < 0 ? null : batches,
    };
  }

  // The processor share of a restarted process is unknown.
  function processOf(before, after, seconds) {
    const known = before && before.pid === after.pid && seconds > 0;
    return {
      process: after.name,
      pid: after.pid,
      cpu_share: known ? Math.max(after.cpu_s - before.cpu_s, 0) / seconds : null,
      memory_bytes: after.resident_bytes,
      restarts: after.starts - 1,
    };
  }

  // Rows of models and processes, and the total of models, between two documents. Counts are as old as the reports they come from.
  function between(before, after) {
    const answersS = after.fronts_time_s - before.fronts_time_s, samplesS = after.scheduler_time_s - before.scheduler_time_s;
    const old = new Map(before.models.map((model) => [model.name, model]));
    const processes = new Map(before.processes.map((process) => [process.name, process]));
    const all = after.models.map((model) => changes(old.get(model.name) || model, model));
    const total = { statuses: joined(all.map((each) => each.statuses)), fates: joined(all.map((each) => each.fates)),
      buckets: joined(all.map((each) => each.buckets)),
      batches: all.some((each) => each.batches === null) ? null : all.reduce((count, each) => count + each.batches, 0) };
    return {
      is_new: answersS > 0 || samplesS > 0,
      total: figuresOf(total, answersS, samplesS),
      models: after.models.map((model, place) => ({ model: model.name, slo_s: model.slo_s, ...figuresOf(all[place], answersS, samplesS) })),
      processes: after.processes.map((process) => processOf(processes.get(process.name), process, after.time_s - before.time_s)),
    };
  }

  return { between, percentile, grown };
})();
