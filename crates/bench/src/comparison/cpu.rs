//! Processor time of the whole machine, from `/proc/stat`.

use serde::{Deserialize, Serialize};

use crate::sandbox::SandboxError;

/// The unit of `/proc/stat`: USER_HZ, which Linux fixes at 100 for user space.
const TICKS_PER_SECOND: f64 = 100.0;

/// The time of all processors together since the machine started, in ticks (proc_stat(5)). User time
/// includes guest time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuTime {
    user: u64,
    nice: u64,
    system: u64,
    idle: u64,
    iowait: u64,
    irq: u64,
    softirq: u64,
    steal: u64,
}

/// Processor time by mpstat's categories, per cent of all processors together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuShares {
    /// Programs, with a nice value or without.
    pub usr: f64,
    /// The kernel for programs.
    pub sys: f64,
    /// Hardware interrupts.
    pub irq: f64,
    /// Soft interrupts, in which the kernel processes packets.
    pub soft: f64,
    /// Taken by the machine below this one.
    pub steal: f64,
    /// Nothing, waiting for a disk included.
    pub idle: f64,
}

impl CpuTime {
    /// Reads `/proc/stat`.
    ///
    /// # Errors
    /// [`SandboxError::Io`] or [`SandboxError::UnexpectedOutput`].
    pub fn now() -> Result<Self, SandboxError> {
        let text = std::fs::read_to_string("/proc/stat")
            .map_err(|source| SandboxError::Io { what: "read /proc/stat".to_owned(), source })?;
        Self::parse(&text).ok_or_else(|| SandboxError::UnexpectedOutput {
            command: "/proc/stat".to_owned(),
            why: "no line of all processors".to_owned(),
        })
    }

    fn parse(stat: &str) -> Option<Self> {
        let line = stat.lines().find(|line| line.starts_with("cpu "))?;
        let fields: Vec<u64> =
            line.split_whitespace().skip(1).map_while(|word| word.parse().ok()).collect();
        let [user, nice, system, idle, iowait, irq, softirq, steal, ..] = fields[..] else {
            return None;
        };
        Some(Self { user, nice, system, idle, iowait, irq, softirq, steal })
    }

    /// Busy seconds since an earlier reading: all but idle and stolen time, which is not work of this
    /// machine.
    #[must_use]
    pub fn busy_since(self, earlier: Self) -> f64 {
        let busy = |time: Self| time.user + time.nice + time.system + time.irq + time.softirq;
        busy(self).saturating_sub(busy(earlier)) as f64 / TICKS_PER_SECOND
    }

    /// The use of the time since an earlier reading.
    #[must_use]
    pub fn shares_since(self, earlier: Self) -> CpuShares {
        let all = self.all().saturating_sub(earlier.all()).max(1) as f64;
        let share = |pick: fn(Self) -> u64| {
            let ticks = pick(self).saturating_sub(pick(earlier));
            ticks as f64 * 100.0 / all
        };
        CpuShares {
            usr: share(|time| time.user + time.nice),
            sys: share(|time| time.system),
            irq: share(|time| time.irq),
            soft: share(|time| time.softirq),
            steal: share(|time| time.steal),
            idle: share(|time| time.idle + time.iowait),
        }
    }

    const fn all(self) -> u64 {
        let Self { user, nice, system, idle, iowait, irq, softirq, steal } = self;
        user + nice + system + idle + iowait + irq + softirq + steal
    }
}

impl CpuShares {
    /// Each category by itself over several readings.
    #[must_use]
    pub fn medians(all: &[Self]) -> Self {
        let median = |pick: fn(&Self) -> f64| {
            let values: Vec<f64> = all.iter().map(pick).collect();
            let median = super::stats::median(&values).unwrap_or_default();
            (median * 10.0).round() / 10.0
        };
        Self {
            usr: median(|shares| shares.usr),
            sys: median(|shares| shares.sys),
            irq: median(|shares| shares.irq),
            soft: median(|shares| shares.soft),
            steal: median(|shares| shares.steal),
            idle: median(|shares| shares.idle),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const STAT: &str = "cpu  10 20 30 4000 500 60 70 80 900 1000\ncpu0 1 1 1 1 1 1 1 1 1 1\n";

    #[test]
    fn busy_time_leaves_out_idle_iowait_steal_and_guest() {
        let time = CpuTime::parse(STAT).unwrap();
        assert_eq!(time.busy_since(CpuTime::default()), 1.9);
        assert_eq!(CpuTime::parse("intr 1 2 3"), None);
        assert_eq!(CpuTime::parse("cpu  1 2 3"), None);
    }

    #[test]
    fn shares_are_of_what_has_passed_since() {
        let before = CpuTime::parse(STAT).unwrap();
        let after = "cpu  35 25 40 4030 510 60 85 85 900 1000\n";
        let shares = CpuTime::parse(after).unwrap().shares_since(before);
        let CpuShares { usr, sys, irq, soft, steal, idle } = shares;
        assert_eq!([usr, sys, irq, soft, steal, idle], [30.0, 10.0, 0.0, 15.0, 5.0, 40.0]);
        let other = CpuShares { usr: 20.0, ..shares };
        assert_eq!(CpuShares::medians(&[shares, other]).usr, 25.0);
    }
}
