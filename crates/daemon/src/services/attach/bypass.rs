//! Rules and limits that direct ports bypass: foreign rules on the bridge, and limits on containers' ports of
//! it. They are checked when a container is attached and at intervals, so that users learn of them.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use weft_kernel::{AttachSpec, BridgePorts, Kernel, KernelError};

use super::Attachments;
use crate::devices::{SWITCH, TAP};
use crate::services::supervisor::Pulse;

/// The interval between checks: new rules stay unnoticed for so long.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// How long plugging a container in waits for nft, in milliseconds.
const LOOK_LIMIT_MS: u64 = 2_000;

/// The last known state of the bridge.
#[derive(Default)]
pub(crate) struct Bypass {
    seen: Mutex<Option<Result<BridgePorts, String>>>,
    /// Rules and limits that do not see the frames of direct ports, one a line.
    said: Mutex<Vec<String>>,
}

impl Bypass {
    /// Checks now, but not for long.
    ///
    /// # Errors
    /// The kernel does not report the bridge's ports.
    pub(crate) async fn look(&self, kernel: &Kernel) -> Result<BridgePorts, KernelError> {
        let seen = match kernel.bridge_ports(SWITCH, TAP).await {
            // Without the program, or without nftables in the kernel, the bridge has no nft rules.
            Err(error) if lacks_nft(&error) => kernel.bridge_ports_without_nft(SWITCH, TAP).await,
            seen => seen,
        };
        let known = seen.as_ref().map_err(ToString::to_string).cloned();
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(known);
        seen
    }

    /// The reason why a container attached now may not have a direct port, unless requested explicitly.
    pub(crate) async fn objection(&self, kernel: &Kernel) -> Option<String> {
        let limit = Duration::from_millis(LOOK_LIMIT_MS);
        if tokio::time::timeout(limit, self.look(kernel)).await.is_err() {
            let known = self.seen.lock().unwrap_or_else(PoisonError::into_inner).is_some();
            if !known {
                return Some("nft did not list its rules in time".to_owned());
            }
        }
        self.known()
    }

    /// Like [`Self::objection`], from the last known state.
    pub(crate) fn known(&self) -> Option<String> {
        match self.seen.lock().unwrap_or_else(PoisonError::into_inner).as_ref()? {
            Ok(seen) => {
                seen.judge.as_ref().map(|judge| format!("rules may see frames there: {judge}"))
            }
            Err(error) => Some(format!("cannot list the rules there: {error}")),
        }
    }

    /// The rules and limits that do not see frames of direct ports, one a line.
    pub(crate) fn said(&self) -> Vec<String> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Logs each line once, and keeps the lines for queries.
    pub(crate) fn say(&self, lines: Vec<String>) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        for line in lines.iter().filter(|line| !said.contains(line)) {
            tracing::warn!("{line}");
        }
        *said = lines;
    }
}

fn lacks_nft(error: &KernelError) -> bool {
    let without = |complaint: &str| complaint.contains("not supported");
    matches!(error, KernelError::NftMissing { .. }) || without(&error.to_string())
}

/// The rules and limits that do not see the frames between these containers with direct ports and other hosts.
pub(crate) fn passed_by(seen: &BridgePorts, direct: &[(String, AttachSpec)]) -> Vec<String> {
    const FRAMES: &str = "frames between other hosts and containers with direct ports";
    let mut lines = Vec::new();
    if direct.is_empty() {
        return lines;
    }
    if let Some(judge) = &seen.judge {
        lines.push(format!("{judge} does not see {FRAMES} ({})", direct.len()));
    }
    for (name, spec) in direct {
        let Some(port) = seen.ports.get(&spec.host_name) else { continue };
        let host_name = &spec.host_name;
        if let Some(shaped) = &port.shaped {
            lines.push(format!("tc {shaped} on {host_name} does not see {FRAMES}: {name}"));
        }
        if port.limited {
            lines.push(format!("tc ingress on {host_name} does not see {FRAMES}: {name}"));
        }
        if port.captured {
            lines.push(format!("a packet capture on {host_name} does not see {FRAMES}: {name}"));
        }
        if port.cut_off {
            lines.push(format!(
                "the bridge port state of {host_name} does not apply to {FRAMES}: {name}"
            ));
        }
    }
    lines
}

/// Checks at intervals for as long as it is polled.
pub(crate) async fn keep_looking(attachments: Arc<Attachments>, pulse: Pulse) {
    loop {
        attachments.look_at_bypass().await;
        pulse.wait(tokio::time::sleep(LOOK_EVERY)).await;
    }
}

#[cfg(test)]
mod tests {
    use weft_kernel::BridgePort;

    use super::*;

    const PORT: BridgePort =
        BridgePort { index: 4, limited: false, shaped: None, cut_off: false, captured: false };

    fn spec() -> AttachSpec {
        AttachSpec {
            id: "netns:c1".into(),
            namespace: "/run/netns/c1".into(),
            identity: None,
            host_name: "weftv1".into(),
            name: "weft0".into(),
            mac: [2, 0, 0, 0, 0, 1],
            addresses: Vec::new(),
            mtu: 1_388,
            gso_max_segs: None,
            enable_ipv6: false,
            gateways: Vec::new(),
            multicast_route: false,
            isolated: false,
            bridge: None,
        }
    }

    #[test]
    fn rules_that_direct_ports_bypass_are_named_with_their_containers() {
        let direct = [("c1".to_owned(), spec())];
        let seen = |port: BridgePort, judge: Option<&str>| BridgePorts {
            tap: Some(3),
            ports: [("weftv1".to_owned(), port)].into(),
            judge: judge.map(str::to_owned),
        };
        assert_eq!(passed_by(&seen(PORT, None), &direct), Vec::<String>::new());
        let judged = seen(PORT, Some("bridge fw forward"));
        assert_eq!(passed_by(&judged, &[]), Vec::<String>::new());
        let lines = passed_by(&judged, &direct);
        assert!(lines.len() == 1 && lines[0].starts_with("bridge fw forward does not see"));
        let shaped = BridgePort { shaped: Some("tbf".into()), ..PORT };
        let limited = BridgePort { limited: true, ..PORT };
        let cut_off = BridgePort { cut_off: true, ..PORT };
        let captured = BridgePort { captured: true, ..PORT };
        for (port, name) in [
            (shaped, "tc tbf on weftv1"),
            (limited, "tc ingress"),
            (cut_off, "state"),
            (captured, "a packet capture on weftv1"),
        ] {
            let lines = passed_by(&seen(port, None), &direct);
            assert!(lines.len() == 1 && lines[0].contains(name), "{lines:?}");
            assert!(lines[0].ends_with(": c1"), "{lines:?}");
        }
    }

    #[test]
    fn where_rules_may_see_frames_auto_takes_no_direct_port() {
        let bypass = Bypass::default();
        let set = |seen| *bypass.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(seen);
        assert_eq!(bypass.known(), None);
        set(Ok(BridgePorts::default()));
        assert_eq!(bypass.known(), None);
        set(Ok(BridgePorts { judge: Some("ip nat x".into()), ..BridgePorts::default() }));
        assert_eq!(bypass.known().as_deref(), Some("rules may see frames there: ip nat x"));
        set(Err("nft is slow".into()));
        assert!(bypass.known().is_some_and(|reason| reason.contains("nft is slow")));
    }
}
