//! The condition of a container's interface: missing IPv6, overlapping routes, and damage done by others.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use weft_api::Attachment;
use weft_kernel::{Attached, DIRECT_LOCAL_NAME, KernelError, NoIpv6, OverlapKind, PortNotice};

use super::error::AttachError;
use super::maker::Maker;
use super::mend::Judgement;
use super::ports;
use super::{Attachments, Locked, Saved, mac_of, spec_of};
use crate::devices::TAP;

/// The condition of one interface.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(crate) struct Condition {
    /// Enable IPv6 where the container has it disabled.
    #[serde(default)]
    pub(crate) enable_ipv6: bool,
    /// The reason why the container has none of its IPv6 addresses.
    #[serde(default)]
    no_ipv6: Option<String>,
    /// Addresses that both the network and the container's own routes lead to.
    #[serde(default)]
    overlaps: Vec<String>,
    /// Of the host itself: why containers do not leave the network through it.
    #[serde(skip)]
    pub(super) way_out: Vec<String>,
    /// Damage to the interface, until it is repaired.
    #[serde(skip)]
    damage: Option<String>,
}

impl Condition {
    /// The condition of a newly plugged-in interface.
    pub(crate) fn wanted(enable_ipv6: bool, before: Option<&Self>) -> Self {
        let enable_ipv6 = enable_ipv6 || before.is_some_and(|before| before.enable_ipv6);
        Self { enable_ipv6, ..Self::default() }
    }

    /// Records damage that cannot be repaired for now.
    pub(crate) fn cannot_be_mended(&mut self, damage: Option<&str>, error: &KernelError) {
        let damage = damage.map_or_else(String::new, |damage| format!(" {damage};"));
        self.damage = Some(format!("damaged:{damage} weft cannot repair it: {error}"));
    }
}

impl Saved {
    /// Records the result of plugging in.
    pub(crate) fn note(&mut self, attached: Attached) {
        let reason = attached.ipv6.err().map(|reason| match reason {
            NoIpv6::Kernel => "no IPv6: the kernel has none",
            NoIpv6::SwitchedOff if self.maker == Maker::Host => {
                "no IPv6: it is disabled on this host (net.ipv6.conf.*.disable_ipv6); weft expose --ipv6 enables it on this interface"
            }
            NoIpv6::SwitchedOff => {
                "no IPv6: it is disabled in the container (net.ipv6.conf.*.disable_ipv6); weft attach --ipv6 enables it on this interface"
            }
        });
        if reason != self.condition.no_ipv6.as_deref() {
            let container = &self.attachment.name;
            tracing::info!(container, reason = reason.unwrap_or("none"), "a change of IPv6");
        }
        self.condition.no_ipv6 = reason.map(str::to_owned);
        self.condition.damage = None;
    }

    /// The attachment as shown to others, with the addresses that the container really has.
    pub(crate) fn shown(&self) -> Attachment {
        let Condition { no_ipv6, overlaps, way_out, damage, .. } = &self.condition;
        let mut shown = self.attachment.clone();
        if no_ipv6.is_some() {
            shown.addresses.retain(|address| address.addr().is_ipv4());
            shown.gateways.retain(IpAddr::is_ipv4);
        }
        shown.notes =
            no_ipv6.iter().chain(overlaps).chain(way_out).chain(damage).cloned().collect();
        shown
    }

    /// Removing a port from the switch cuts its container off. Weft does not undo that, but reports it: the damage
    /// after a notice, if the notice changes it.
    fn damage_after(&self, notice: &PortNotice) -> Option<Option<String>> {
        let PortNotice::Device { name, has_master, .. } = notice else { return None };
        if *name != self.host_interface {
            return None;
        }
        let again = if self.maker == Maker::Host { "expose" } else { "attach" };
        let text =
            format!("cut off: {name} was removed from the switch; weft {again} adds it again");
        let is_said = self.condition.damage.as_ref() == Some(&text);
        (is_said == *has_master).then(|| (!has_master).then_some(text))
    }

    /// The fault of one of its devices, if any.
    fn wrong_with(&self, notice: &PortNotice) -> Option<String> {
        let PortNotice::Device { name, mac, mtu, up, .. } = notice else { return None };
        if self.maker.is_docker() && *name != self.host_interface {
            // The engine moves it, names it and sets it up.
            return None;
        }
        let is_inside = *name == self.attachment.interface;
        if *name != self.host_interface && !is_inside && name != DIRECT_LOCAL_NAME {
            let is_renamed = !ports::is_on_its_way(name);
            return is_renamed.then(|| format!("its interface was renamed {name}"));
        }
        let what = if !up {
            "is down"
        } else if is_inside && *mac != mac_of(&self.attachment).0 {
            "has another Ethernet address"
        } else if *mtu != u32::from(self.attachment.mtu) {
            "has another MTU"
        } else {
            return None;
        };
        Some(format!("{name} {what}"))
    }
}

impl Attachments {
    /// Refuses a container whose own routes hide the network, and records where the network hides its
    /// routes. A container that is already attached stays so.
    pub(crate) async fn look_at_routes(
        &self,
        saved: &mut Saved,
        is_attached: bool,
    ) -> Result<(), AttachError> {
        if saved.maker == Maker::Host {
            return self.look_at_host_routes(saved).await;
        }
        let overlaps = self.kernel.overlaps(&spec_of(saved)).await?;
        let hidden = overlaps.iter().find(|overlap| overlap.kind == OverlapKind::Hidden);
        if let Some(overlap) = hidden.filter(|_| !is_attached) {
            return Err(AttachError::Hidden(overlap.to_string()));
        }
        saved.condition.overlaps = overlaps.iter().map(ToString::to_string).collect();
        for overlap in &saved.condition.overlaps {
            tracing::warn!(container = saved.attachment.name, overlap, "two routes to one address");
        }
        Ok(())
    }

    /// Judges the attachments that a notice is about.
    pub(crate) async fn judge(&self, notice: &PortNotice) -> Vec<Judgement> {
        let mut inner = self.lock().await;
        match notice {
            PortNotice::AddressGone { address } => without_address(&inner.saved, *address),
            notice => judge_device(&mut inner, notice).into_iter().collect(),
        }
    }

    /// Records damage for `ps` that stays for a while.
    pub(crate) async fn note_damage(&self, id: &str, damage: String) {
        if let Some(saved) = self.lock().await.saved.get_mut(id) {
            saved.condition.damage = Some(damage);
        }
    }

    /// Restores a container's interface. Returns false if there was nothing to do.
    ///
    /// # Errors
    /// It cannot be repaired now; `ps` says why.
    pub(crate) async fn mend(&self, id: &str, damage: &str) -> Result<bool, KernelError> {
        let mut inner = self.lock().await;
        let Some(saved) = inner.saved.get_mut(id) else { return Ok(false) };
        if !saved.is_alive() || saved.is_gone() {
            return Ok(false);
        }
        let changes = self.kernel.changes();
        let result = self.plug_in(saved).await;
        let container = &saved.attachment.name;
        if let Err(error) = &result {
            tracing::warn!(container, damage, %error, "cannot repair its interface");
            saved.condition.cannot_be_mended(Some(damage), error);
        } else if self.kernel.changes() != changes {
            tracing::warn!(container, damage, "another program changed its interface; restored it");
            return Ok(true);
        }
        result.map(|()| false)
    }

    /// The vector engine's device on the switch is gone: gives it a new one.
    pub(crate) async fn renew_tap(&self) {
        match self.kernel.restore_device_name(TAP).await {
            Ok(true) => {}
            Ok(false) => self.ports.renew_tap().await,
            Err(error) => tracing::warn!(%error, "cannot rename the vector engine's device back"),
        }
        self.engine.repair().await;
        self.shortcuts.plugged_in();
    }
}

/// Judges the attachment whose device a notice is about.
fn judge_device(inner: &mut Locked<'_>, notice: &PortNotice) -> Option<Judgement> {
    let (id, of, damage) = match notice {
        PortNotice::Device { id, name, .. } => {
            let saved = inner.saved.get(id)?;
            let wrong = saved.wrong_with(notice);
            // Most notices change nothing, and so must not publish the list of all containers anew.
            if let Some(damage) = saved.damage_after(notice) {
                inner.saved.get_mut(id)?.condition.damage = damage;
            }
            (id, name, wrong)
        }
        PortNotice::Gone { id, name } => {
            let is_ours = |saved: &&Saved| {
                !ports::is_on_its_way(name)
                    && (!saved.maker.is_docker() || *name == saved.host_interface)
            };
            inner.saved.get(id).filter(is_ours)?;
            (id, name, Some(format!("{name} is gone")))
        }
        _ => return None,
    };
    Some(Judgement { id: id.clone(), of: of.clone(), damage })
}

/// The attachments that may lack an address which is gone somewhere: several networks may have it, and the notice does
/// not say which.
fn without_address(saved: &BTreeMap<String, Saved>, address: IpAddr) -> Vec<Judgement> {
    let has = |it: &&Saved| {
        let mut addresses = it.attachment.addresses.iter();
        !it.maker.is_docker() && addresses.any(|it| it.addr() == address)
    };
    let judged = |it: &Saved| Judgement {
        id: it.attachment.id.clone(),
        of: address.to_string(),
        damage: Some(format!("the address {address} is gone")),
    };
    saved.values().filter(has).map(judged).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An attachment with a key, the name of its network, and an address with its prefix.
    fn saved(id: &str, vni: u32, address: &str) -> Saved {
        let attachment = format!(
            r#"{{"id":"{id}","name":"a","interface":"weft0","mac":"02:00:00:00:00:07","vni":{vni},
            "addresses":["{address}","fd00::1/64"],"mtu":1388,"since":""}}"#
        );
        let sandbox = r#"{"id":"netns:a","name":"a","namespace":"/run/netns/a","kind":"netns",
            "pid":null,"pid_start":null,"device":4,"inode":5}"#;
        let text = format!(
            r#"{{"sandbox":{sandbox},"attachment":{attachment},"host_interface":"weftv1","multicast_route":true}}"#
        );
        serde_json::from_str(&text).unwrap_or_else(|it| panic!("{it}"))
    }

    #[test]
    fn an_address_that_is_gone_is_missed_on_each_network_that_has_it() {
        let docker = Maker::Docker { endpoint: "e".to_owned() };
        let all: BTreeMap<String, Saved> = [
            saved("netns:a", 1, "10.32.0.1/12"),
            saved("shop/netns:b", 7, "10.32.0.1/16"),
            saved("netns:c", 1, "10.32.0.2/12"),
            // Its engine alone gives it addresses.
            Saved { maker: docker, ..saved("docker-endpoint:e", 8, "10.32.0.1/16") },
        ]
        .map(|saved| (saved.attachment.id.clone(), saved))
        .into();
        let missed = |text: &str| -> Vec<String> {
            let address = text.parse().unwrap_or_else(|it| panic!("{it}"));
            without_address(&all, address).into_iter().map(|it| it.id).collect()
        };
        assert_eq!(missed("10.32.0.1"), ["netns:a", "shop/netns:b"]);
        assert_eq!(missed("10.32.0.2"), ["netns:c"]);
        assert_eq!(missed("10.32.0.3"), [""; 0]);
        let judged = without_address(&all, [10, 32, 0, 1].into());
        let text = Some("the address 10.32.0.1 is gone".to_owned());
        assert!(judged.iter().all(|it| it.of == "10.32.0.1" && it.damage == text));
    }

    #[test]
    fn each_fault_of_an_interface_is_named() {
        let mut saved = saved("netns:a", 1, "10.32.0.1/12");
        let notice = |name: &str, mac: u8, mtu, up, has_master| PortNotice::Device {
            id: "netns:a".into(),
            name: name.into(),
            mac: vec![2, 0, 0, 0, 0, mac],
            mtu,
            up,
            has_master,
        };
        let wrong = |notice| saved.wrong_with(&notice);
        for right in [
            notice("weft0", 7, 1388, true, false),
            notice("weftv1", 9, 1388, true, true),
            notice(DIRECT_LOCAL_NAME, 3, 1388, true, false),
            notice("weftt1", 7, 1500, false, false),
        ] {
            assert_eq!(wrong(right.clone()), None, "{right:?}");
        }
        for (notice, said) in [
            (notice("weft0", 7, 1388, false, false), "weft0 is down"),
            (notice("weft0", 8, 1388, true, false), "weft0 has another Ethernet address"),
            (notice("weft0", 7, 1500, true, false), "weft0 has another MTU"),
            (notice("eth9", 7, 1388, true, false), "its interface was renamed eth9"),
            (notice("weftv1", 9, 1388, false, true), "weftv1 is down"),
        ] {
            assert_eq!(wrong(notice).as_deref(), Some(said));
        }
        let (out, back) =
            (notice("weftv1", 9, 1388, true, false), notice("weftv1", 9, 1388, true, true));
        assert_eq!(saved.damage_after(&back), None);
        assert_eq!(saved.damage_after(&notice("weft0", 7, 1388, true, false)), None);
        saved.condition.damage = saved.damage_after(&out).flatten();
        assert!(saved.shown().notes.concat().contains("cut off: weftv1"));
        assert_eq!(saved.damage_after(&out), None);
        assert_eq!(saved.damage_after(&back), Some(None));
        saved.condition.damage = None;
        saved.attachment.gateways =
            vec![[10, 32, 0, 9].into(), [0xfd00, 0, 0, 0, 0, 0, 0, 9].into()];
        saved.note(Attached { ipv6: Err(NoIpv6::Kernel) });
        assert_eq!(saved.shown().gateways, saved.attachment.gateways[..1]);
        let shown: Vec<String> = saved.shown().addresses.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["10.32.0.1/12"]);
        assert_eq!(saved.shown().notes, ["no IPv6: the kernel has none"]);
        saved.note(Attached { ipv6: Ok(()) });
        assert_eq!((saved.shown().addresses.len(), saved.shown().notes.len()), (2, 0));
    }
}
