//! DEL, CHECK, GC and STATUS.

use serde_json::json;
use weft_container::cni::{Detach, Listed, Readiness, Target};

use super::*;
use crate::lab::{BOOT, Call, STARTED_NS, attached, previous};

const VALID: &str = "cni.dev/valid-attachments";

pub(super) fn rows() -> Vec<Row> {
    [
        del_releases(),
        del_never_fails(),
        check_compares(),
        check_fails(),
        gc_keeps_what_is_listed(),
        gc_ends_in_time(),
        status(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn del_releases() -> Vec<Row> {
    vec![
        Row {
            config: |version, config| config["prevResult"] = previous(version),
            wanted: Success(|run, _| {
                let [detach] = run.detached()[..] else { panic!("{:?}", run.calls) };
                assert_eq!(detach.target, Target::from(key("web-1", "eth0")));
                assert_eq!(detach.started_ns, STARTED_NS);
                assert!(run.unlinked.is_empty() && run.tombstones.is_empty());
            }),
            ..row("DEL releases the attachment", ALL, "DEL")
        },
        Row {
            variables: &[("CNI_NETNS", ""), ("CNI_PATH", "")],
            wanted: Success(|run, _| assert_eq!(run.detached().len(), 1)),
            ..row("DEL needs neither namespace nor previous result", ALL, "DEL")
        },
        Row {
            variables: &[("CNI_NETNS", "@GONE")],
            wanted: Success(|run, _| assert_eq!(run.detached().len(), 1)),
            ..row("DEL works after the namespace is gone", ALL, "DEL")
        },
        Row {
            variables: &[("CNI_NETNS", "relative"), ("CNI_ARGS", "nonsense")],
            wanted: Success(|run, _| assert_eq!(run.detached().len(), 1)),
            ..row("DEL works with malformed optional variables", ALL, "DEL")
        },
        Row {
            config: |_, config| *config = json!({}),
            wanted: Success(|run, _| {
                let wanted = Target { network: None, ..Target::from(key("web-1", "eth0")) };
                assert_eq!(run.detached()[0].target, wanted);
            }),
            ..row("DEL works with an empty configuration, on all networks", ALL, "DEL")
        },
        Row {
            config: |_, config| {
                config["cniVersion"] = "9.9.9".into();
                config["bridge"] = 7.into();
                config["prevResult"] = "nonsense".into();
                config["runtimeDir"] = 7.into();
            },
            wanted: Success(|run, _| assert_eq!(run.detached().len(), 1)),
            ..row("DEL works with a configuration that ADD refuses", ALL, "DEL")
        },
        Row {
            daemon: || Fake::in_mood(Mood::Down),
            wanted: Success(|run, _| {
                assert_eq!(run.unlinked, [(run.namespace.clone(), "eth0".to_owned())]);
                let [tombstone] = &run.tombstones[..] else { panic!("{:?}", run.tombstones) };
                assert_eq!(tombstone.target, Target::from(key("web-1", "eth0")));
                assert_eq!((tombstone.started_ns, tombstone.boot.as_str()), (STARTED_NS, BOOT));
                assert!(run.outcome.notes[0].contains("going on without the daemon"));
                assert!(run.noted_first, "the runtime may end the plugin at any time");
            }),
            ..row("DEL with the daemon down removes the interface, and notes it", ALL, "DEL")
        },
    ]
}

fn del_never_fails() -> Vec<Row> {
    vec![
        Row {
            variables: &[("CNI_NETNS", "@GONE")],
            daemon: || Fake::in_mood(Mood::Down),
            wanted: Success(|run, _| {
                assert_eq!((run.unlinked.len(), run.tombstones.len()), (0, 1));
            }),
            ..row("DEL with daemon and namespace gone is noted", ALL, "DEL")
        },
        Row {
            variables: &[("CNI_NETNS", "@OWN")],
            daemon: || Fake::in_mood(Mood::Down),
            wanted: Success(|run, _| {
                assert_eq!((run.unlinked.len(), run.tombstones.len()), (0, 1));
            }),
            ..row("DEL never touches the host's interfaces", ALL, "DEL")
        },
        Row {
            daemon: || Fake::in_mood(Mood::Hangs),
            wanted: Success(|run, _| {
                assert_eq!((run.detached().len(), run.unlinked.len()), (1, 1));
                assert_eq!(run.tombstones.len(), 1);
            }),
            ..row("DEL with a daemon that hangs succeeds in time", ALL, "DEL")
        },
        Row {
            daemon: || Fake::in_mood(Mood::ComesUp),
            wanted: Success(|run, _| {
                assert_eq!((run.detached().len(), run.tombstones.len()), (2, 0));
            }),
            ..row("DEL while the daemon starts reaches it", ALL, "DEL")
        },
        Row {
            daemon: || refusing(Refusal::Internal, "netlink says no"),
            wanted: Success(|run, _| {
                assert_eq!((run.unlinked.len(), run.tombstones.len()), (1, 1));
            }),
            ..row("DEL succeeds where the daemon fails", ALL, "DEL")
        },
        Row {
            daemon: || Fake::in_mood(Mood::Down),
            unlink: Unlink::Fails,
            wanted: Success(|run, _| {
                assert_eq!(run.tombstones.len(), 1);
                assert!(run.outcome.notes[1].contains("cannot remove eth0"), "{:?}", run.outcome);
            }),
            ..row("DEL succeeds where the interface cannot be removed", ALL, "DEL")
        },
        Row {
            daemon: || Fake::in_mood(Mood::Hangs),
            unlink: Unlink::Hangs,
            wanted: Success(|run, _| {
                assert_eq!(run.tombstones.len(), 1);
                assert!(run.outcome.notes[1].contains("within 900 ms"), "{:?}", run.outcome);
            }),
            ..row("DEL ends in time, and is noted, where all hangs", ALL, "DEL")
        },
    ]
}

fn check_compares() -> Vec<Row> {
    vec![
        Row {
            config: ours_before,
            wanted: Success(|run, _| assert_eq!(run.calls, [Call::Check(key("web-1", "eth0"))])),
            ..row("CHECK of a whole attachment succeeds", SINCE_0_4_0, "CHECK")
        },
        Row {
            wanted: Error(7, "prevResult", UNASKED),
            ..row("CHECK needs a previous result", SINCE_0_4_0, "CHECK")
        },
        Row {
            config: ours_before,
            daemon: || {
                let mut fake = Fake::working();
                fake.checked.interface_is_whole = false;
                fake
            },
            wanted: Error(102, "eth0", |_| {}),
            ..row("CHECK fails if the interface is gone", SINCE_0_4_0, "CHECK")
        },
        Row {
            config: ours_before,
            daemon: || {
                let mut fake = Fake::working();
                fake.checked.addresses[1].1 = false;
                fake
            },
            wanted: Error(102, "fd00::5/64", |_| {}),
            ..row("CHECK fails if an address is gone", SINCE_0_4_0, "CHECK")
        },
        Row {
            config: |version, config| {
                ours_before(version, config);
                let result = &mut config["prevResult"];
                result["ips"].as_array_mut().unwrap().truncate(1);
                result["interfaces"][1]["mac"] = "02:00:00:00:00:ff".into();
                result["interfaces"][1]["mtu"] = 1_000.into();
            },
            daemon: || {
                let mut fake = Fake::working();
                fake.checked.addresses[1].1 = false;
                fake
            },
            ..row("CHECK allows changes of a later plugin", SINCE_0_4_0, "CHECK")
        },
        Row {
            config: |version, config| {
                ours_before(version, config);
                let added = json!({ "address": "192.0.2.9/24", "interface": 1 });
                config["prevResult"]["ips"].as_array_mut().unwrap().push(added);
            },
            ..row("CHECK ignores addresses of others", SINCE_0_4_0, "CHECK")
        },
    ]
}

fn check_fails() -> Vec<Row> {
    vec![
        Row {
            config: |version, config| {
                ours_before(version, config);
                config["prevResult"]["ips"] = json!([]);
            },
            ..row("CHECK allows a later plugin to hide all addresses", SINCE_0_4_0, "CHECK")
        },
        Row {
            config: |version, config| {
                ours_before(version, config);
                config["prevResult"]["ips"] =
                    json!([{ "address": "10.32.9.9/12", "interface": 1 }]);
            },
            wanted: Error(102, "10.32.9.9/12", |_| {}),
            ..row("CHECK fails if Weft knows other addresses", SINCE_0_4_0, "CHECK")
        },
        Row {
            config: ours_before,
            daemon: || refusing(Refusal::Unknown, "no such attachment"),
            wanted: Error(3, "no such attachment", |_| {}),
            ..row("CHECK of an unknown attachment fails", SINCE_0_4_0, "CHECK")
        },
        Row {
            variables: &[("CNI_NETNS", "@GONE")],
            config: ours_before,
            wanted: Error(3, "the container has ended", UNASKED),
            ..row("CHECK without the namespace fails", SINCE_0_4_0, "CHECK")
        },
        Row {
            config: ours_before,
            daemon: || Fake::in_mood(Mood::Hangs),
            wanted: Error(11, "within 5000 ms", |run| assert_eq!(run.calls.len(), 1)),
            ..row("CHECK ends in time, and changes nothing", SINCE_0_4_0, "CHECK")
        },
    ]
}

fn gc_keeps_what_is_listed() -> Vec<Row> {
    vec![
        Row {
            daemon: with_attachments,
            wanted: Success(|run, _| assert!(run.calls.is_empty())),
            ..row("GC without a list does nothing", SINCE_1_1_0, "GC")
        },
        Row {
            config: |_, config| config[VALID] = json!(null),
            daemon: with_attachments,
            wanted: Success(|run, _| collected(run, &["web-1 eth0", "web-1 net1", "db-1 eth0"])),
            ..row("GC with null removes all", SINCE_1_1_0, "GC")
        },
        Row {
            config: |_, config| config[VALID] = json!([]),
            daemon: with_attachments,
            wanted: Success(|run, _| collected(run, &["web-1 eth0", "web-1 net1", "db-1 eth0"])),
            ..row("GC with an empty list removes all", SINCE_1_1_0, "GC")
        },
        Row {
            config: |_, config| {
                config[VALID] = json!([
                    { "containerID": "web-1", "ifname": "eth0" },
                    { "containerID": "gone-1", "ifname": "eth0" },
                ]);
            },
            daemon: with_attachments,
            wanted: Success(|run, _| collected(run, &["web-1 net1", "db-1 eth0"])),
            ..row("GC keeps what is listed, by container and interface", SINCE_1_1_0, "GC")
        },
        Row {
            config: |_, config| {
                config["cni.dev/attachments"] =
                    json!([{ "containerID": "db-1", "ifname": "eth0" }]);
            },
            daemon: with_attachments,
            wanted: Success(|run, _| collected(run, &["web-1 eth0", "web-1 net1"])),
            ..row("GC takes the list under its second name", SINCE_1_1_0, "GC")
        },
        Row {
            config: |_, config| config[VALID] = json!([{ "containerID": null, "ifname": "eth0" }]),
            daemon: with_attachments,
            wanted: Error(6, VALID, UNASKED),
            ..row("GC with a malformed list removes nothing", SINCE_1_1_0, "GC")
        },
        Row {
            config: |_, config| config[VALID] = json!([]),
            daemon: || Fake { stuck: vec!["web-1"], ..with_attachments() },
            wanted: Error(105, "2 attachments not removed", |run| {
                collected(run, &["web-1 eth0", "web-1 net1", "db-1 eth0"]);
            }),
            ..row("GC goes on after an error, and reports it", SINCE_1_1_0, "GC")
        },
        Row {
            config: |_, config| config[VALID] = json!([]),
            daemon: || Fake::in_mood(Mood::Down),
            wanted: Error(11, "weft launch", |_| {}),
            ..row("GC with the daemon down is code 11", SINCE_1_1_0, "GC")
        },
    ]
}

fn gc_ends_in_time() -> Vec<Row> {
    vec![Row {
        config: |_, config| config[VALID] = json!([]),
        daemon: || Fake::in_mood(Mood::Hangs),
        wanted: Error(11, "longer than 30000 ms", |_| {}),
        ..row("GC ends in time", SINCE_1_1_0, "GC")
    }]
}

fn status() -> Vec<Row> {
    vec![
        Row {
            config: |_, config| config["network"] = "net-7".into(),
            wanted: Success(|run, _| assert_eq!(run.calls, [Call::Status("net-7".into())])),
            ..row("STATUS succeeds if ADD would", SINCE_1_1_0, "STATUS")
        },
        Row {
            daemon: || {
                let readiness = Some(Readiness::Unready("no range yet".into()));
                Fake { readiness, ..Fake::working() }
            },
            wanted: Error(50, "no range yet", |_| {}),
            ..row("STATUS is 50 if ADD would fail", SINCE_1_1_0, "STATUS")
        },
        Row {
            daemon: || {
                let readiness = Some(Readiness::CutOff("no peer answers".into()));
                Fake { readiness, ..Fake::working() }
            },
            wanted: Error(51, "no peer answers", |_| {}),
            ..row("STATUS is 51 if containers are cut off", SINCE_1_1_0, "STATUS")
        },
        Row {
            daemon: || Fake::in_mood(Mood::Down),
            wanted: Error(50, "weft launch", |_| {}),
            ..row("STATUS is 50 with the daemon down", SINCE_1_1_0, "STATUS")
        },
        Row {
            daemon: || Fake::in_mood(Mood::Hangs),
            wanted: Error(50, "within 2000 ms", |_| {}),
            ..row("STATUS is 50 with a daemon that hangs", SINCE_1_1_0, "STATUS")
        },
        Row {
            config: |_, config| config["bridge"] = 7.into(),
            wanted: Error(2, "bridge: 7", UNASKED),
            ..row("STATUS fails for a configuration that ADD refuses", SINCE_1_1_0, "STATUS")
        },
    ]
}

/// The result of the ADD before, as the runtime sends it back.
fn ours_before(version: Version, config: &mut Value) {
    let addresses = attached().addresses;
    let mut ips: Vec<Value> = addresses
        .iter()
        .map(|address| json!({ "interface": 1, "address": address.to_string() }))
        .collect();
    if version < V1_0_0 {
        for (ip, family) in ips.iter_mut().zip(["4", "6"]) {
            ip["version"] = family.into();
        }
    }
    config["prevResult"] = json!({
        "cniVersion": version.as_str(),
        "interfaces": [
            { "name": "vw1234", "mac": "02:00:00:00:00:01" },
            { "name": "eth0", "mac": "02:00:00:00:00:02", "sandbox": "/run/netns/web" },
        ],
        "ips": ips,
        "dns": {},
    });
}

fn with_attachments() -> Fake {
    let listed = |key: Key, started_ns| Listed { key, started_ns };
    let on_another = Key { network: "other".into(), ..key("web-1", "eth0") };
    Fake {
        listed: vec![
            listed(key("web-1", "eth0"), 1),
            listed(key("web-1", "net1"), 1),
            listed(key("db-1", "eth0"), 1),
            // Another network's, and one whose ADD began after GC.
            listed(on_another, 1),
            listed(key("new-1", "eth0"), STARTED_NS + 1),
        ],
        ..Fake::working()
    }
}

fn collected(run: &Run, wanted: &[&str]) {
    assert_eq!(run.calls[0], Call::List);
    let removed: Vec<String> = run
        .detached()
        .iter()
        .inspect(|detach| assert_eq!(detach.started_ns, STARTED_NS))
        .map(|Detach { target, .. }| format!("{} {}", target.container, target.interface))
        .collect();
    assert_eq!(removed, wanted);
}
