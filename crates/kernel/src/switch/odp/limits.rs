//! Limits on group frames from each local port to peers of the kernel engine. Pure: time is an argument.
//!
//! If two containers also reach each other outside Weft, each broadcast circulates. A port has two meters
//! of the datapath: one for broadcasts, one for all other multicast. A port that exceeds one sends no group
//! frames behind the tunnel for a while, in which the loop ends. The limits are those of a bridge
//! (`groups.rs`).

use std::collections::BTreeMap;

use weft_path::Mac;

use crate::switch::groups::{
    BROADCASTS_AT_ONCE_MAX, BROADCASTS_PER_S_MAX, GROUP_FRAMES_AT_ONCE_MAX, GROUP_FRAMES_PER_S_MAX,
    LOOP_KNOWN_S, LOOP_PAUSE_S,
};

/// Reports of IGMPv3 and MLDv2 go to these groups (RFC 3376 section 4.2.14, RFC 3810 section 5.2.14).
const REPORT_GROUPS: [Mac; 2] = [Mac([1, 0, 0x5e, 0, 0, 0x16]), Mac([0x33, 0x33, 0, 0, 0, 0x16])];

/// Whether frames to this group report that their sender listens to groups.
pub(super) fn is_report_group(destination: Mac) -> bool {
    REPORT_GROUPS.contains(&destination)
}

/// The class of frames that a meter counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Class {
    /// Frames to all, to the groups of neighbour discovery, and to those of local network control.
    Broadcast,
    /// All other group frames, of which a legitimate stream may have many.
    Stream,
}

impl Class {
    pub(super) const ALL: [Self; 2] = [Self::Broadcast, Self::Stream];

    /// The class of frames to this group.
    pub(super) fn of(destination: Mac) -> Self {
        match destination.0 {
            [0xff, 0xff, 0xff, 0xff, 0xff, 0xff]
            | [0x33, 0x33, 0xff, ..]
            | [0x33, 0x33, 0, 0, 0, _]
            | [1, 0, 0x5e, 0, 0, _] => Self::Broadcast,
            _ => Self::Stream,
        }
    }

    /// Frames in a second.
    pub(super) const fn rate(self) -> u32 {
        match self {
            Self::Broadcast => BROADCASTS_PER_S_MAX,
            Self::Stream => GROUP_FRAMES_PER_S_MAX,
        }
    }

    /// Frames at once.
    pub(super) const fn at_once(self) -> u32 {
        match self {
            Self::Broadcast => BROADCASTS_AT_ONCE_MAX,
            Self::Stream => GROUP_FRAMES_AT_ONCE_MAX,
        }
    }
}

#[derive(Debug, Clone)]
struct Meter {
    id: u32,
    class: Class,
    /// Frames that it had dropped when it was last read.
    dropped: u64,
    /// For frames that the daemon sends on in parts.
    bucket: Bucket,
}

#[derive(Debug, Clone)]
struct Port {
    meters: [Meter; 2],
    /// Whether the datapath has the meters.
    metered: bool,
    paused_until_ms: Option<u64>,
    known_until_ms: u64,
}

/// The limits of all local ports.
#[derive(Debug, Clone, Default)]
pub(super) struct Limits {
    ports: BTreeMap<u32, Port>,
    /// By number: whether a port has this meter. The lowest free number is taken, as the datapath's table of
    /// meters requires.
    taken: Vec<bool>,
    /// Frames that were not sent to peers.
    limited: u64,
}

impl Limits {
    /// Gives a local port its meter numbers. The datapath may not have the meters yet.
    pub(super) fn add(&mut self, port: u32) {
        if self.ports.contains_key(&port) {
            return;
        }
        let meters = Class::ALL.map(|class| Meter {
            id: self.take_id(),
            class,
            dropped: 0,
            bucket: Bucket::new(class.rate().into(), class.at_once().into()),
        });
        let new = Port { meters, metered: false, paused_until_ms: None, known_until_ms: 0 };
        self.ports.insert(port, new);
    }

    fn take_id(&mut self) -> u32 {
        let free = self.taken.iter().position(|taken| !taken).unwrap_or(self.taken.len());
        if free == self.taken.len() {
            self.taken.push(true);
        } else if let Some(taken) = self.taken.get_mut(free) {
            *taken = true;
        }
        u32::try_from(free).unwrap_or(u32::MAX)
    }

    /// The port is gone. Its meters stay in the datapath until another port takes their numbers.
    pub(super) fn remove(&mut self, port: u32) {
        for meter in self.ports.remove(&port).map(|port| port.meters).into_iter().flatten() {
            if let Some(taken) = self.taken.get_mut(meter.id as usize) {
                *taken = false;
            }
        }
    }

    /// The ports whose meters are not made yet, and these meters.
    pub(super) fn unmade(&self) -> Vec<(u32, [(u32, Class); 2])> {
        let wanted = |(number, port): (&u32, &Port)| {
            (*number, port.meters.each_ref().map(|meter| (meter.id, meter.class)))
        };
        self.ports.iter().filter(|(_, port)| !port.metered).map(wanted).collect()
    }

    /// The datapath has the port's meters now.
    pub(super) fn made(&mut self, port: u32) {
        if let Some(port) = self.ports.get_mut(&port) {
            port.metered = true;
            port.meters.iter_mut().for_each(|meter| meter.dropped = 0);
        }
    }

    /// Notes that the datapath lost a port's meters; false if it had none.
    pub(super) fn lost(&mut self, port: u32) -> bool {
        self.ports.get_mut(&port).is_some_and(|port| std::mem::take(&mut port.metered))
    }

    /// The meter that frames of this class from this port pass, if the datapath has it.
    pub(super) fn meter(&self, port: u32, class: Class) -> Option<u32> {
        let port = self.ports.get(&port).filter(|port| port.metered)?;
        port.meters.iter().find(|meter| meter.class == class).map(|meter| meter.id)
    }

    /// The meters of a port that the datapath has.
    pub(super) fn meters(&self, port: u32) -> Vec<u32> {
        let port = self.ports.get(&port).filter(|port| port.metered);
        port.into_iter().flat_map(|port| &port.meters).map(|meter| meter.id).collect()
    }

    /// The ports with meters.
    pub(super) fn ports(&self) -> Vec<u32> {
        let metered = self.ports.iter().filter(|(_, port)| port.metered);
        metered.map(|(number, _)| *number).collect()
    }

    /// Whether nothing that this port sends to groups goes to peers now.
    pub(super) fn is_paused(&self, port: u32) -> bool {
        self.ports.get(&port).is_some_and(|port| port.paused_until_ms.is_some())
    }

    /// Notes how many frames a meter of the port has dropped since it was made. True if the port now pauses.
    pub(super) fn note(&mut self, port: u32, id: u32, dropped: u64, now_ms: u64) -> bool {
        let Some(port) = self.ports.get_mut(&port) else { return false };
        let Some(meter) = port.meters.iter_mut().find(|meter| meter.id == id) else { return false };
        let more = dropped.saturating_sub(meter.dropped);
        meter.dropped = dropped;
        self.limited += more;
        // The meter counts until the flows have changed; these frames do not make the pause longer.
        if port.paused_until_ms.is_some() {
            return false;
        }
        more > 0 && port.pause(now_ms)
    }

    /// Whether a frame that the daemon forwards in parts may go to peers; no meter applies to it.
    pub(super) fn admits(&mut self, port: u32, class: Class, now_ms: u64) -> bool {
        let Some(port) = self.ports.get_mut(&port) else { return true };
        let Some(meter) = port.meters.iter_mut().find(|meter| meter.class == class) else {
            return true;
        };
        let admitted = meter.bucket.take(now_ms);
        if !admitted {
            self.limited += 1;
            port.pause(now_ms);
        }
        admitted
    }

    /// Ends pauses that are over and returns their ports.
    pub(super) fn resume(&mut self, now_ms: u64) -> Vec<u32> {
        let over = |port: &&mut Port| port.paused_until_ms.is_some_and(|until| until <= now_ms);
        let mut resumed = Vec::new();
        for (number, port) in &mut self.ports {
            if let Some(port) = Some(port).filter(over) {
                port.paused_until_ms = None;
                resumed.push(*number);
            }
        }
        resumed
    }

    /// Ports that exceeded a limit in the last minute.
    pub(super) fn known(&self, now_ms: u64) -> Vec<u32> {
        let known = self.ports.iter().filter(|(_, port)| now_ms < port.known_until_ms);
        known.map(|(number, _)| *number).collect()
    }

    /// Frames that were not sent to peers.
    pub(super) fn limited(&self) -> u64 {
        self.limited
    }
}

impl Port {
    /// False if it paused already.
    fn pause(&mut self, now_ms: u64) -> bool {
        self.known_until_ms = now_ms + u64::from(LOOP_KNOWN_S) * 1_000;
        let until = now_ms + u64::from(LOOP_PAUSE_S) * 1_000;
        self.paused_until_ms.replace(until).is_none()
    }
}

/// Admits a number of frames per second, and a number at once.
#[derive(Debug, Clone)]
pub(super) struct Bucket {
    rate_per_s: u64,
    thousandths_max: u64,
    thousandths: u64,
    at_ms: u64,
}

impl Bucket {
    pub(super) fn new(rate_per_s: u64, at_once: u64) -> Self {
        let thousandths_max = at_once * 1_000;
        Self { rate_per_s, thousandths_max, thousandths: thousandths_max, at_ms: 0 }
    }

    pub(super) fn take(&mut self, now_ms: u64) -> bool {
        let earned = now_ms.saturating_sub(self.at_ms).saturating_mul(self.rate_per_s);
        self.thousandths = self.thousandths.saturating_add(earned).min(self.thousandths_max);
        self.at_ms = now_ms;
        let enough = self.thousandths >= 1_000;
        if enough {
            self.thousandths -= 1_000;
        }
        enough
    }
}
