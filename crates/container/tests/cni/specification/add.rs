//! ADD, and the wishes for an attachment.

use serde_json::json;
use weft_container::cni::DaemonError;

use super::*;
use crate::lab::{STARTED_NS, previous};

pub(super) fn rows() -> Vec<Row> {
    [results(), failures(), requested_addresses(), settings(), remainders()]
        .into_iter()
        .flatten()
        .collect()
}

fn results() -> Vec<Row> {
    vec![
        Row {
            wanted: Success(|run, _| {
                let attach = run.attach();
                assert_eq!(attach.key, key("web-1", "eth0"));
                assert_eq!(attach.started_ns, STARTED_NS);
                assert_eq!(attach.namespace.path, run.namespace);
                assert_eq!(attach.wishes.network, "shop");
                assert_eq!(run.calls.len(), 1);
            }),
            ..row("ADD asks for an attachment by its key", ALL, "ADD")
        },
        Row {
            wanted: Success(|run, version| {
                assert_eq!(run.json(), whole_result(run, version));
            }),
            ..row("the result has the form of 0.3 and 0.4", BEFORE_1_0_0, "ADD")
        },
        Row {
            wanted: Success(|run, version| {
                assert_eq!(run.json(), whole_result(run, version));
            }),
            ..row("the result has the form of 1.0 and 1.1", SINCE_1_0_0, "ADD")
        },
        Row {
            config: |version, config| config["prevResult"] = previous(version),
            wanted: Success(merged),
            ..row("a previous result is merged, not dropped", ALL, "ADD")
        },
        Row {
            config: |_, config| {
                config["prevResult"] = json!({ "interfaces": null, "ips": null, "x": { "y": 1 } });
            },
            wanted: Success(|run, _| {
                assert_eq!(run.json()["x"]["y"], 1);
                assert_eq!(run.json()["interfaces"].as_array().unwrap().len(), 2);
            }),
            ..row("null lists and unknown fields of a previous result pass", ALL, "ADD")
        },
        Row {
            daemon: || {
                let mut fake = Fake::working();
                fake.attached.host_interface.as_mut().unwrap().0 = "eth0".into();
                fake
            },
            wanted: Success(|run, _| {
                let interfaces = run.json()["interfaces"].clone();
                assert_eq!(interfaces.as_array().unwrap().len(), 1);
                assert_eq!(interfaces[0]["sandbox"], run.namespace.to_str().unwrap());
            }),
            ..row("no interface of the host has the container's name", ALL, "ADD")
        },
        Row {
            daemon: || refusing(Refusal::InterfaceExists, "the container has an eth0"),
            wanted: Error(101, "has an eth0", |run| assert_eq!(run.calls.len(), 1)),
            ..row("ADD fails if the interface exists", ALL, "ADD")
        },
    ]
}

fn failures() -> Vec<Row> {
    vec![
        Row {
            daemon: || refusing(Refusal::Deleted, "DEL came before"),
            wanted: Error(104, "DEL came before", |_| {}),
            ..row("a late ADD does not win over DEL", ALL, "ADD")
        },
        Row {
            daemon: || refusing(Refusal::Invalid, "no network shop"),
            wanted: Error(7, "no network shop", |_| {}),
            ..row("ADD to an unknown network fails", ALL, "ADD")
        },
        Row {
            daemon: || refusing(Refusal::NoAddress, "10.32.0.0/12 is exhausted"),
            wanted: Error(103, "exhausted", |_| {}),
            ..row("ADD without a free address fails", ALL, "ADD")
        },
        Row {
            daemon: || refusing(Refusal::Busy, "the ring is not yet agreed"),
            wanted: Error(11, "not yet agreed", |_| {}),
            ..row("a passing condition is code 11", ALL, "ADD")
        },
        Row {
            daemon: || {
                let (field, value) = ("ipMasq".into(), "true".into());
                refusing(Refusal::Unsupported { field, value }, "this host forwards nothing")
            },
            wanted: Error(2, "ipMasq: true", |_| {}),
            ..row("the daemon may refuse a field", ALL, "ADD")
        },
        Row {
            daemon: || Fake::in_mood(Mood::Down),
            wanted: Error(11, "weft launch", |run| {
                assert!(run.unlinked.is_empty() && run.tombstones.is_empty());
            }),
            ..row("ADD with the daemon down is code 11, and undoes nothing", ALL, "ADD")
        },
        Row {
            daemon: || Fake::in_mood(Mood::Hangs),
            wanted: Error(11, "within 8000 ms", |run| {
                assert_eq!(run.detached().len(), 1);
                assert_eq!(run.unlinked, [(run.namespace.clone(), "eth0".to_owned())]);
                assert_eq!(run.tombstones[0].started_ns, STARTED_NS);
            }),
            ..row("ADD ends within 10 s, and undoes all", ALL, "ADD")
        },
        Row {
            daemon: || Fake::in_mood(Mood::Dies),
            unlink: Unlink::Hangs,
            wanted: Error(11, "within 8000 ms", |run| {
                assert_eq!((run.detached().len(), run.tombstones.len()), (2, 1));
            }),
            ..row("ADD ends within 10 s while the daemon dies", ALL, "ADD")
        },
        Row {
            daemon: || {
                Fake::in_mood(Mood::Fails(DaemonError::Interrupted("connection reset".into())))
            },
            wanted: Error(11, "connection reset", |run| {
                assert_eq!((run.detached().len(), run.tombstones.len()), (1, 1));
            }),
            ..row("ADD whose answer is lost is undone", ALL, "ADD")
        },
    ]
}

fn requested_addresses() -> Vec<Row> {
    vec![
        Row {
            variables: &[("CNI_ARGS", "IP=10.32.0.7;MAC=02:00:00:00:00:07")],
            config: |_, config| {
                config["runtimeConfig"] =
                    json!({ "ips": ["10.32.0.9/12", "10.32.0.9/12"], "mac": "02:00:00:00:00:09" });
                config["args"] =
                    json!({ "cni": { "ips": ["10.32.0.8"], "mac": "02:00:00:00:00:08" } });
            },
            wanted: Success(|run, _| asked(run, &["10.32.0.9/12"], Some("02:00:00:00:00:09"))),
            ..row("capabilities come first", ALL, "ADD")
        },
        Row {
            variables: &[("CNI_ARGS", "IP=10.32.0.7;MAC=02:00:00:00:00:07")],
            config: |_, config| {
                config["args"] =
                    json!({ "cni": { "ips": ["10.32.0.8"], "mac": "02:00:00:00:00:08" } });
            },
            wanted: Success(|run, _| asked(run, &["10.32.0.8"], Some("02:00:00:00:00:08"))),
            ..row("then arguments in the configuration", ALL, "ADD")
        },
        Row {
            variables: &[("CNI_ARGS", "IgnoreUnknown=true;IP=10.32.0.7;MAC=02:00:00:00:00:07")],
            wanted: Success(|run, _| asked(run, &["10.32.0.7"], Some("02:00:00:00:00:07"))),
            ..row("then CNI_ARGS", ALL, "ADD")
        },
        Row {
            variables: &[("CNI_ARGS", "IP=10.32.0.7")],
            config: |_, config| config["runtimeConfig"] = json!({ "ips": ["fd00::9/64"] }),
            wanted: Success(|run, _| asked(run, &["10.32.0.7", "fd00::9/64"], None)),
            ..row("each family may come from another source", ALL, "ADD")
        },
        Row {
            config: |_, config| {
                config["runtimeConfig"] = json!({
                    "aliases": ["www"],
                    "portMappings": [
                        { "hostPort": 8080, "containerPort": 80, "protocol": "TCP", "hostIP": "" },
                        { "hostPort": 53, "containerPort": 53, "protocol": "udp" },
                    ],
                });
                config["args"] = json!({
                    "cni": { "labels": [{ "key": "app", "value": "web" }] },
                    "other": { "ignored": true },
                });
            },
            wanted: Success(|run, _| {
                let wishes = &run.attach().wishes;
                assert_eq!(wishes.aliases, ["www"]);
                assert_eq!(wishes.labels, [("app".to_owned(), "web".to_owned())]);
                let [first, second] = wishes.port_mappings.as_slice() else { panic!() };
                assert_eq!((first.host_port, first.protocol.as_str()), (8_080, "tcp"));
                assert_eq!((second.container_port, second.protocol.as_str()), (53, "udp"));
            }),
            ..row("names, labels and ports are handed on", ALL, "ADD")
        },
        Row {
            config: |_, config| {
                let lists = json!({ "shop": ["www", "7a5f"], "other": ["mail"] });
                config["runtimeConfig"] = json!({ "aliases": lists });
            },
            wanted: Success(|run, _| assert_eq!(run.attach().wishes.aliases, ["www", "7a5f"])),
            ..row("podman lists names by network", ALL, "ADD")
        },
    ]
}

fn settings() -> Vec<Row> {
    vec![
        Row {
            config: |_, config| {
                config["network"] = "net-7".into();
                config["isDefaultGateway"] = true.into();
                config["ipMasq"] = true.into();
            },
            wanted: Success(|run, _| {
                let wishes = &run.attach().wishes;
                assert_eq!(
                    (wishes.network.as_str(), run.attach().key.network.as_str()),
                    ("net-7", "shop")
                );
                assert!(wishes.default_route && wishes.masquerade);
            }),
            ..row("a configuration names Weft's network and its gateway", ALL, "ADD")
        },
        Row {
            config: |_, config| {
                config["dns"] = json!({ "nameservers": ["192.0.2.1"], "domain": "a.example" });
                config["runtimeConfig"] = json!({ "dns": { "servers": ["192.0.2.2"], "searches": ["b.example"], "options": ["ndots:5"] } });
            },
            wanted: Success(|run, _| {
                let wanted = json!({ "nameservers": ["192.0.2.2"], "search": ["b.example"], "options": ["ndots:5"] });
                assert_eq!(run.json()["dns"], wanted);
            }),
            ..row("the capability's resolver comes first", ALL, "ADD")
        },
        Row {
            config: |_, config| config["dns"] = json!({ "nameservers": ["192.0.2.1"] }),
            wanted: Success(|run, _| {
                assert_eq!(run.json()["dns"], json!({ "nameservers": ["192.0.2.1"] }));
            }),
            ..row("then the configuration's resolver", ALL, "ADD")
        },
        Row {
            config: |_, config| config["networks"] = "shop".into(),
            wanted: Error(2, "unsupported field networks: \"shop\"", UNASKED),
            ..row("an unknown field is named with its value", ALL, "ADD")
        },
        Row {
            config: |_, config| config["bridge"] = 7.into(),
            wanted: Error(2, "unsupported field bridge: 7", UNASKED),
            ..row("a field of another plugin is named with its value", ALL, "ADD")
        },
        Row {
            config: |_, config| config["ipam"] = json!({ "type": "host-local" }),
            wanted: Error(2, "unsupported field ipam.type: \"host-local\"", UNASKED),
            ..row("another plugin's addresses are refused", ALL, "ADD")
        },
        Row {
            config: |_, config| {
                config["runtimeConfig"] = json!({ "bandwidth": { "ingressRate": 1 } });
            },
            wanted: Error(2, "runtimeConfig.bandwidth", UNASKED),
            ..row("a capability of another plugin is refused", ALL, "ADD")
        },
    ]
}

fn remainders() -> Vec<Row> {
    vec![
        Row {
            config: |_, config| {
                config["prevResult"] = json!({
                    "routes": [{ "dst": "224.0.0.0/4" }],
                    "dns": { "nameservers": ["10.32.0.1"], "domain": "first.example" },
                });
                config["dns"] = json!({ "nameservers": ["10.32.0.1"], "domain": "ours.example" });
            },
            daemon: || {
                let mut fake = Fake::working();
                fake.attached.mtu = 0;
                fake
            },
            wanted: Success(|run, _| {
                let result = run.json();
                assert_eq!(result["routes"], json!([{ "dst": "224.0.0.0/4" }]));
                let dns = json!({ "nameservers": ["10.32.0.1"], "domain": "first.example" });
                assert_eq!(result["dns"], dns);
                assert_eq!(result["interfaces"][1].get("mtu"), None);
            }),
            ..row("the result has nothing twice, and no unknown MTU", ALL, "ADD")
        },
        Row {
            config: |_, config| {
                config["ipam"] = json!({});
                config["ipMasq"] = false.into();
                config["capabilities"] = json!({ "ips": true });
                config["cni.dev/x"] = 1.into();
                config["runtimeConfig"] = json!({ "cgroupPath": "/a" });
            },
            ..row("fields without effect pass", ALL, "ADD")
        },
        Row {
            config: |_, config| config["name"] = "a/b".into(),
            wanted: Error(7, "name", UNASKED),
            ..row("a network's name has letters, digits and three more", ALL, "ADD")
        },
        Row {
            config: |_, config| drop(config.as_object_mut().unwrap().remove("name")),
            wanted: Error(7, "must name its network", UNASKED),
            ..row("a network has a name", ALL, "ADD")
        },
    ]
}

fn asked(run: &Run, addresses: &[&str], mac: Option<&str>) {
    let wishes = &run.attach().wishes;
    let given: Vec<String> = wishes.addresses.iter().map(ToString::to_string).collect();
    assert_eq!(given, addresses);
    assert_eq!(wishes.mac.map(|mac| mac.to_string()).as_deref(), mac);
}

/// The whole object that the specification wants for the attachment of [`attached`].
fn whole_result(run: &Run, version: Version) -> Value {
    let mut result = json!({
        "cniVersion": version.as_str(),
        "interfaces": [
            { "name": "vw1234", "mac": "02:00:00:00:00:01" },
            { "name": "eth0", "mac": "02:00:00:00:00:02", "sandbox": run.namespace.to_str() },
        ],
        "ips": [
            { "interface": 1, "address": "10.32.0.5/12", "gateway": "10.32.0.1" },
            { "interface": 1, "address": "fd00::5/64" },
        ],
        "routes": [{ "dst": "224.0.0.0/4" }],
        "dns": { "nameservers": ["10.32.0.1"] },
    });
    if version < V1_0_0 {
        result["ips"][0]["version"] = "4".into();
        result["ips"][1]["version"] = "6".into();
    }
    if version >= V1_1_0 {
        result["interfaces"][0]["mtu"] = 1_388.into();
        result["interfaces"][1]["mtu"] = 1_388.into();
    }
    result
}

fn merged(run: &Run, version: Version) {
    let (result, before) = (run.json(), previous(version));
    for list in ["interfaces", "ips", "routes"] {
        let (all, first) = (result[list].as_array().unwrap(), before[list].as_array().unwrap());
        assert_eq!(&all[..first.len()], first, "{list}");
    }
    let interfaces = result["interfaces"].as_array().unwrap();
    assert_eq!(interfaces.len(), 4);
    for ip in &result["ips"].as_array().unwrap()[1..] {
        let index = usize::try_from(ip["interface"].as_u64().unwrap()).unwrap();
        assert_eq!(interfaces[index]["name"], "eth0");
    }
    let dns = json!({ "nameservers": ["192.0.2.53", "10.32.0.1"], "search": ["example.net"] });
    assert_eq!(result["dns"], dns);
    assert_eq!(result["routes"].as_array().unwrap().len(), 2);
}
