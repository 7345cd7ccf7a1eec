//! The datapath's meters: made with each local port, and read from time to time.

use rustix::io::Errno;

use super::{
    codec_meter::{get_meter, meter_dropped, set_meter},
    decide::Decision,
    flow::{Frame, Output},
    limits::Class,
    state::Core,
    tables::Change,
};
use crate::{netlink::error::RequestError, switch::groups::GroupCounts};

/// How often it is looked which ports send too many frames to groups, in milliseconds.
pub const LIMIT_LOOK_MS: u64 = 5_000;

impl Core {
    /// Makes the meters of ports that have none; it is tried again at each look.
    pub(super) async fn make_meters(&mut self) {
        let Some(family) = self.families.meter else {
            return self.say_unlimited("it has no meters, which need Linux 4.18");
        };
        let mut failed = None;
        'ports: for (port, meters) in self.tables.limits().unmade() {
            for (id, class) in meters {
                let request = set_meter(family, self.datapath, id, class);
                let made = self.requests.run(request).await;
                self.watch_for_end(&made);
                if let Err(error) = made {
                    let refused = matches!(error, RequestError::Kernel { .. });
                    failed = Some(error.while_doing("make a meter of the datapath").to_string());
                    match refused {
                        true => continue 'ports,
                        false => break 'ports,
                    }
                }
            }
            self.tables.edit_limits(|limits| {
                limits.made(port);
                [port]
            });
        }
        match failed {
            Some(why) => self.say_unlimited(&why),
            None => self.unlimited = None,
        }
    }

    fn say_unlimited(&mut self, why: &str) {
        if self.unlimited.as_deref() != Some(why) {
            tracing::warn!(why, "cannot limit broadcasts to peers of the kernel engine");
            self.unlimited = Some(why.to_owned());
        }
    }

    /// Notes that a meter may count frames of this decision.
    pub(super) fn note_metered(&mut self, frame: &Frame, decision: &Decision) {
        if decision.depends.contains(&Change::Limit(frame.port)) {
            self.metered.insert(frame.port);
        }
    }

    /// Ends pauses, and when it is due looks which ports have sent too much.
    pub(super) async fn keep_limits(&mut self, now_ms: u64) {
        if now_ms >= self.next_limit_look_ms {
            self.next_limit_look_ms = now_ms + LIMIT_LOOK_MS;
            self.make_meters().await;
            self.read_meters(now_ms).await;
            let counts = self.group_counts(now_ms);
            self.groups.send_if_modified(|last| {
                let changed = *last != counts;
                *last = counts;
                changed
            });
        }
        self.tables.edit_limits(|limits| limits.resume(now_ms));
        self.refresh().await;
    }

    /// Reads only meters of ports that have recently sent group frames: each costs a request.
    async fn read_meters(&mut self, now_ms: u64) {
        let Some(family) = self.families.meter else { return };
        let mut ports = std::mem::take(&mut self.metered);
        let has_flows = |port: &u32| self.index.reads(Change::Limit(*port));
        ports.extend(self.tables.limits().ports().into_iter().filter(has_flows));
        for port in ports {
            for id in self.tables.limits().meters(port) {
                let found = self.requests.run(get_meter(family, self.datapath, id)).await;
                self.watch_for_end(&found);
                let dropped = match found {
                    Ok(found) => found.first().and_then(|body| meter_dropped(body)),
                    // Another program deleted it.
                    Err(error) if error.is(Errno::NOENT) => {
                        self.tables.edit_limits(|limits| limits.lost(port).then_some(port));
                        break;
                    }
                    Err(_) => None,
                };
                let Some(dropped) = dropped else { continue };
                self.tables
                    .edit_limits(|limits| limits.note(port, id, dropped, now_ms).then_some(port));
            }
        }
    }

    fn group_counts(&self, now_ms: u64) -> GroupCounts {
        let limits = self.tables.limits();
        let known = limits.known(now_ms);
        let named = self.tables.ports().filter(|(number, _)| known.contains(number));
        GroupCounts {
            limited: limits.limited(),
            ports: named.map(|(_, name)| name.to_owned()).collect(),
            reports: self.counters.reports_kept,
            ..GroupCounts::default()
        }
    }

    /// The copies of a frame that needs several requests. Each would count at the meter by itself, so the daemon
    /// counts the frame.
    pub(super) fn limit_parts(&mut self, frame: &Frame, outputs: &[Output]) -> Vec<Output> {
        let metered = outputs.iter().any(|output| matches!(output, Output::Meter(_)));
        let now_ms = self.now_ms();
        let mut admitted = true;
        if metered {
            let class = Class::of(frame.destination);
            self.tables.edit_limits(|limits| {
                let paused = limits.is_paused(frame.port);
                admitted = limits.admits(frame.port, class, now_ms);
                (limits.is_paused(frame.port) != paused).then_some(frame.port)
            });
        }
        let leaves = |output: &&Output| match output {
            Output::Port(_) => true,
            Output::Meter(_) => false,
            Output::Tunnel { .. } => admitted,
        };
        outputs.iter().filter(leaves).copied().collect()
    }
}
