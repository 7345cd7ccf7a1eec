//! Variables and versions.

use serde_json::json;
use weft_container::cni::Version::*;

use super::*;

pub(super) fn rows() -> Vec<Row> {
    [required_variables(), optional_variables(), versions()].into_iter().flatten().collect()
}

fn required_variables() -> Vec<Row> {
    vec![
        Row {
            variables: &[("CNI_COMMAND", "")],
            wanted: Error(4, "CNI_COMMAND is not set; this program is a CNI plugin", UNASKED),
            ..row("no command", ALL, "ADD")
        },
        Row {
            variables: &[("CNI_COMMAND", "add")],
            wanted: Error(4, "ADD, DEL, CHECK, GC, STATUS, VERSION", UNASKED),
            ..row("unknown command", ALL, "ADD")
        },
        Row {
            variables: &[("CNI_CONTAINERID", ""), ("CNI_NETNS", ""), ("CNI_IFNAME", "")],
            wanted: Error(4, "CNI_CONTAINERID, CNI_NETNS, CNI_IFNAME missing", UNASKED),
            ..row("ADD names every missing variable", ALL, "ADD")
        },
        Row {
            variables: &[("CNI_NETNS", "")],
            wanted: Error(4, "CNI_NETNS missing", UNASKED),
            ..row("CHECK needs a namespace", SINCE_0_4_0, "CHECK")
        },
        Row {
            variables: &[("CNI_CONTAINERID", ""), ("CNI_IFNAME", "")],
            wanted: Error(4, "CNI_CONTAINERID, CNI_IFNAME missing", UNASKED),
            ..row("DEL needs container and interface", ALL, "DEL")
        },
        Row {
            variables: &[("CNI_PATH", "")],
            wanted: Error(4, "CNI_PATH missing", UNASKED),
            ..row("GC needs a path", SINCE_1_1_0, "GC")
        },
        Row {
            variables: &[("CNI_PATH", "")],
            wanted: Error(4, "CNI_PATH missing", UNASKED),
            ..row("STATUS needs a path", SINCE_1_1_0, "STATUS")
        },
        Row {
            variables: &[("CNI_CONTAINERID", "-web")],
            wanted: Error(4, "CNI_CONTAINERID", UNASKED),
            ..row("a container id begins with a letter or digit", ALL, "ADD")
        },
        Row {
            variables: &[("CNI_IFNAME", "sixteen-letters-")],
            wanted: Error(4, "CNI_IFNAME", UNASKED),
            ..row("an interface has at most 15 bytes", ALL, "ADD")
        },
        Row {
            variables: &[("CNI_NETNS", "run/netns/web")],
            wanted: Error(4, "CNI_NETNS", UNASKED),
            ..row("a namespace is an absolute path", ALL, "ADD")
        },
        Row {
            variables: &[("CNI_NETNS", "@OWN")],
            wanted: Error(4, "host's own network namespace", UNASKED),
            ..row("the host's namespace is no container's", ALL, "ADD")
        },
        Row {
            variables: &[("CNI_NETNS", "@GONE")],
            wanted: Error(3, "the container has ended", UNASKED),
            ..row("the namespace must exist", ALL, "ADD")
        },
    ]
}

fn optional_variables() -> Vec<Row> {
    vec![
        Row {
            variables: &[("CNI_ARGS", "FOO=BAR")],
            wanted: Error(4, "add IgnoreUnknown=1", UNASKED),
            ..row("an unknown argument is refused", ALL, "ADD")
        },
        Row {
            variables: &[(
                "CNI_ARGS",
                "IgnoreUnknown=1;K8S_POD_NAMESPACE=prod;K8S_POD_NAME=web;K8S_POD_UID=u1;K8S_POD_INFRA_CONTAINER_ID=web-1;FOO=BAR",
            )],
            wanted: Success(|run, _| {
                let owner = &run.attach().wishes.owner;
                let given = [&owner.namespace, &owner.name, &owner.uid].map(Option::as_deref);
                assert_eq!(given, [Some("prod"), Some("web"), Some("u1")]);
            }),
            ..row("kubelet's arguments name the pod", ALL, "ADD")
        },
        Row {
            variables: &[("CNI_ARGS", "IgnoreUnknown=1;NERDCTL_CNI_DHCP_HOSTNAME=web")],
            wanted: Success(|run, _| {
                assert_eq!(run.attach().wishes.owner.name.as_deref(), Some("web"));
            }),
            ..row("nerdctl tells the host name", ALL, "ADD")
        },
        Row {
            variables: &[("CNI_PATH", ""), ("CNI_ARGS", "")],
            ..row("path and arguments are optional", ALL, "ADD")
        },
    ]
}

fn versions() -> Vec<Row> {
    vec![
        Row {
            variables: &[("CNI_PATH", "")],
            wanted: Success(|run, _| {
                let supported = json!(["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]);
                assert_eq!(run.json()["supportedVersions"], supported);
                assert!(run.calls.is_empty());
            }),
            ..row("VERSION lists versions, and needs nothing", ALL, "VERSION")
        },
        Row {
            config: |_, config| config["cniVersion"] = "0.2.0".into(),
            wanted: Error(1, "0.2.0", UNASKED),
            ..row("an older version is refused", &[V1_1_0], "ADD")
        },
        Row {
            config: |_, config| config["cniVersion"] = "2.0.0".into(),
            wanted: Error(1, "2.0.0", UNASKED),
            ..row("a newer version is refused", &[V1_1_0], "ADD")
        },
        Row {
            config: |_, config| drop(config.as_object_mut().unwrap().remove("cniVersion")),
            wanted: Error(1, "cniVersion is missing, which means 0.2.0", UNASKED),
            ..row("no version means 0.2.0", &[V1_1_0], "ADD")
        },
        Row {
            wanted: Error(1, "CHECK needs cniVersion 0.4.0", UNASKED),
            ..row("CHECK came with 0.4.0", BEFORE_0_4_0, "CHECK")
        },
        Row {
            wanted: Error(1, "GC needs cniVersion 1.1.0", UNASKED),
            ..row("GC came with 1.1.0", BEFORE_1_1_0, "GC")
        },
        Row {
            wanted: Error(1, "STATUS needs cniVersion 1.1.0", UNASKED),
            ..row("STATUS came with 1.1.0", BEFORE_1_1_0, "STATUS")
        },
    ]
}
