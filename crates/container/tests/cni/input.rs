//! Malformed input of the CNI plugin: every variable, every field, and anything at all.

use std::{
    ffi::OsString,
    io::{self, Read},
    os::unix::ffi::OsStringExt,
};

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use weft_container::cni::{
    ARGS_BYTES_MAX, ARGS_PAIRS_MAX, Action, CONFIG_BYTES_MAX, CONTAINER_ID_BYTES_MAX, Code,
    Environment, LIST_ENTRIES_MAX, NAMESPACE_PATH_BYTES_MAX, Outcome, PORT_MAPPINGS_MAX,
    REQUESTED_ADDRESSES_MAX, Rejected, Request, TEXT_BYTES_MAX, Version, read_config,
};

use crate::lab::{Fake, Machine, config, previous, variables};

const COMMANDS: [&str; 6] = ["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"];

fn parse(command: &'static str, change: &[(&str, &str)], stdin: &str) -> Result<Request, Rejected> {
    let mut all: Vec<(String, String)> = variables(command)
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect();
    for (name, value) in change {
        all.retain(|(known, _)| known != name);
        all.push((name.to_string(), value.to_string()));
    }
    for (_, value) in &mut all {
        if value == "@NS" {
            *value = "/run/netns/web".into();
        }
    }
    Request::parse(&Environment::of(all), stdin.as_bytes())
}

fn code(command: &'static str, change: &[(&str, &str)], config: &Value) -> Option<Code> {
    parse(command, change, &config.to_string()).err().map(|rejected| rejected.error.code)
}

/// A configuration with every field that Weft reads.
fn full() -> Value {
    let mut full = config(Version::V1_1_0);
    full["network"] = "shop".into();
    full["runtimeDir"] = "/run/weft".into();
    full["ipMasq"] = true.into();
    full["isDefaultGateway"] = true.into();
    full["ipam"] = json!({ "type": "weft-cni" });
    full["dns"] = json!({ "nameservers": ["192.0.2.1"], "domain": "a.example", "search": ["b"], "options": ["c"] });
    full["args"] = json!({
        "cni": { "ips": ["10.32.0.8"], "mac": "02:00:00:00:00:08", "labels": [{ "key": "a", "value": "b" }] },
    });
    full["runtimeConfig"] = json!({
        "ips": ["10.32.0.9/12"],
        "mac": "02:00:00:00:00:09",
        "aliases": ["www"],
        "dns": { "servers": ["192.0.2.2"], "searches": ["d"], "options": ["e"] },
        "portMappings": [{ "hostPort": 1, "containerPort": 2, "protocol": "tcp", "hostIP": "192.0.2.1" }],
    });
    full["prevResult"] = previous(Version::V1_1_0);
    full["cni.dev/valid-attachments"] = json!([{ "containerID": "a", "ifname": "eth0" }]);
    full
}

/// The paths of all fields, deepest last.
fn pointers(value: &Value, prefix: &str, found: &mut Vec<String>) {
    let mut below = |key: &str, value: &Value| {
        let path = format!("{prefix}/{}", key.replace('~', "~0").replace('/', "~1"));
        found.push(path.clone());
        pointers(value, &path, found);
    };
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| below(key, value)),
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(index, value)| below(&index.to_string(), value));
        }
        _ => {}
    }
}

fn all_pointers() -> Vec<String> {
    let mut found = Vec::new();
    pointers(&full(), "", &mut found);
    found
}

fn with(pointer: &str, value: Value) -> Value {
    let mut changed = full();
    *changed.pointer_mut(pointer).unwrap() = value;
    changed
}

#[test]
fn the_full_configuration_is_accepted() {
    for command in COMMANDS {
        assert_eq!(code(command, &[], &full()), None, "{command}");
    }
    let request = parse("ADD", &[], &full().to_string()).unwrap();
    assert_eq!(request.runtime_dir(), Some("/run/weft".as_ref()));
    let Action::Add(add) = request.action else { panic!() };
    assert!(add.previous.is_some() && add.dns.is_some());
}

/// Fields that may have any type, since Weft does not read them.
const UNREAD: [&str; 2] = ["/type", "/cni.dev~1valid-attachments"];

#[test]
fn a_field_of_the_wrong_type_is_a_decoding_error_that_names_it() {
    let wrong = [json!(true), json!(-1.5), json!("text"), json!([[]]), json!({ "a": {} })];
    for pointer in all_pointers() {
        if UNREAD.iter().any(|unread| pointer.starts_with(unread)) {
            continue;
        }
        let original = full().pointer(&pointer).unwrap().clone();
        for value in &wrong {
            let same_kind = std::mem::discriminant(value) == std::mem::discriminant(&original);
            if same_kind {
                continue;
            }
            let rejected =
                parse("ADD", &[], &with(&pointer, value.clone()).to_string()).unwrap_err();
            let error = &rejected.error;
            assert_eq!(error.code, Code::Decode, "{pointer} = {value}: {error}");
            let field = pointer.split('/').nth(1).unwrap();
            assert!(error.to_string().contains(field), "{pointer} = {value}: {error}");
        }
    }
}

#[test]
fn null_is_the_same_as_absent() {
    for pointer in all_pointers() {
        let (parent, name) = pointer.rsplit_once('/').unwrap();
        let name = name.replace("~1", "/");
        let mut absent = full();
        match absent.pointer_mut(parent).unwrap() {
            Value::Object(map) => drop(map.remove(&name)),
            // A null in a list is an entry of the wrong type.
            _ => continue,
        }
        for command in ["ADD", "STATUS"] {
            let null = parse(command, &[], &with(&pointer, Value::Null).to_string());
            let absent = parse(command, &[], &absent.to_string());
            let codes = [&null, &absent]
                .map(|parsed| parsed.as_ref().err().map(|rejected| rejected.error.code));
            // Within an entry of a list, serde tells a missing field from a null one; both fail.
            assert_eq!(codes[0], codes[1], "{command} {pointer}: {null:?} {absent:?}");
        }
    }
}

#[test]
fn huge_values_are_refused() {
    let texts = |count: usize| json!(vec!["10.32.0.1"; count]);
    let labels = |count: usize| json!(vec![json!({ "key": "a", "value": "b" }); count]);
    let long = || json!(["x".repeat(TEXT_BYTES_MAX + 1)]);
    let port = json!({ "hostPort": 1, "containerPort": 1, "protocol": "tcp" });
    let cases = [
        ("/runtimeConfig/ips", texts(REQUESTED_ADDRESSES_MAX + 1)),
        ("/args/cni/ips", texts(REQUESTED_ADDRESSES_MAX + 1)),
        ("/runtimeConfig/aliases", texts(LIST_ENTRIES_MAX + 1)),
        ("/runtimeConfig/aliases", long()),
        ("/runtimeConfig/aliases", json!({ "shop": long() })),
        ("/dns/nameservers", texts(LIST_ENTRIES_MAX + 1)),
        ("/dns/search", long()),
        ("/runtimeConfig/dns/options", long()),
        ("/args/cni/labels", labels(LIST_ENTRIES_MAX + 1)),
        ("/args/cni/labels", json!([{ "key": "a", "value": "x".repeat(TEXT_BYTES_MAX + 1) }])),
        ("/runtimeConfig/portMappings", json!(vec![port; PORT_MAPPINGS_MAX + 1])),
        ("/name", json!("x".repeat(CONTAINER_ID_BYTES_MAX + 1))),
        ("/network", json!("x".repeat(CONTAINER_ID_BYTES_MAX + 1))),
    ];
    for (pointer, value) in cases {
        let code = code("ADD", &[], &with(pointer, value));
        assert_eq!(code, Some(Code::InvalidConfig), "{pointer}");
    }
    let code = code("ADD", &[], &json!({ "x": "y".repeat(CONFIG_BYTES_MAX) }));
    assert_eq!(code, Some(Code::InvalidConfig));
}

#[test]
fn wrong_values_are_refused() {
    let cases = [
        ("/runtimeConfig/ips/0", json!("10.32.0.9/33")),
        ("/runtimeConfig/ips/0", json!("10.32.0.9/0")),
        ("/runtimeConfig/ips/0", json!("10.32.0")),
        ("/runtimeConfig/ips/0", json!("")),
        ("/runtimeConfig/ips/0", json!("0.0.0.0")),
        ("/runtimeConfig/ips/0", json!("224.0.0.1")),
        ("/runtimeConfig/ips/0", json!("255.255.255.255")),
        ("/args/cni/ips/0", json!("::1")),
        ("/args/cni/ips/0", json!("fd00::1/129")),
        ("/runtimeConfig/mac", json!("02:00:00:00:00")),
        ("/runtimeConfig/mac", json!("01:00:00:00:00:01")),
        ("/args/cni/mac", json!("00:00:00:00:00:00")),
        ("/args/cni/mac", json!("+2:00:00:00:00:01")),
        ("/runtimeConfig/portMappings/0/protocol", json!("icmp")),
        ("/runtimeConfig/portMappings/0/hostIP", json!("localhost")),
        ("/runtimeDir", json!("run/weft")),
        ("/runtimeDir", json!("/run\u{0}")),
        ("/network", json!("a b")),
        ("/name", json!("")),
    ];
    for (pointer, value) in cases {
        let code = code("ADD", &[], &with(pointer, value.clone()));
        assert_eq!(code, Some(Code::InvalidConfig), "{pointer} = {value}");
    }
    for port in [json!(-1), json!(65_536), json!(1.5)] {
        let code = code("ADD", &[], &with("/runtimeConfig/portMappings/0/hostPort", port));
        assert_eq!(code, Some(Code::Decode));
    }
}

#[test]
fn a_configuration_that_is_no_object_is_a_decoding_error() {
    for stdin in ["", " ", "null", "[]", "7", "\"a\"", "{", "{\"a\":}", "{} {}", "\u{feff}{}"] {
        for command in ["ADD", "CHECK", "GC", "STATUS"] {
            let error = parse(command, &[], stdin).unwrap_err().error;
            assert_eq!(error.code, Code::Decode, "{command} {stdin:?}: {error}");
        }
        assert!(parse("VERSION", &[], stdin).is_ok(), "{stdin:?}");
        // The variables say what to delete, and the container could not end otherwise.
        let Action::Del(del) = parse("DEL", &[], stdin).unwrap().action else { panic!() };
        let target = (del.target.network, del.target.container, del.target.interface);
        assert_eq!(target, (None, "web-1".to_owned(), "eth0".to_owned()), "{stdin:?}");
    }
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let error = parse("ADD", &[], &format!("{{\"name\":{deep}}}")).unwrap_err().error;
    assert_eq!(error.code, Code::Decode);
}

#[test]
fn malformed_variables_are_named() {
    let long_id = "a".repeat(CONTAINER_ID_BYTES_MAX + 1);
    let long_path = format!("/{}", "a".repeat(NAMESPACE_PATH_BYTES_MAX));
    let long_args = format!("A={}", "a".repeat(ARGS_BYTES_MAX));
    let many_args = "IgnoreUnknown=1;".repeat(ARGS_PAIRS_MAX + 1);
    let cases = [
        ("CNI_CONTAINERID", "../web"),
        ("CNI_CONTAINERID", "wéb"),
        ("CNI_CONTAINERID", long_id.as_str()),
        ("CNI_NETNS", "netns/web"),
        ("CNI_NETNS", long_path.as_str()),
        ("CNI_IFNAME", "."),
        ("CNI_IFNAME", ".."),
        ("CNI_IFNAME", "a/b"),
        ("CNI_IFNAME", "a:b"),
        ("CNI_IFNAME", "a b"),
        ("CNI_IFNAME", "a\tb"),
        ("CNI_IFNAME", "sixteen-letters-"),
        ("CNI_ARGS", "IP"),
        ("CNI_ARGS", "IP=10.0.0"),
        ("CNI_ARGS", "IP=10.0.0.1,"),
        ("CNI_ARGS", "MAC=02"),
        ("CNI_ARGS", "MAC=ff:ff:ff:ff:ff:ff"),
        ("CNI_ARGS", "IgnoreUnknown=maybe"),
        ("CNI_ARGS", "IgnoreUnknown=0;X=1"),
        ("CNI_ARGS", long_args.as_str()),
        ("CNI_ARGS", many_args.as_str()),
    ];
    for (name, value) in cases {
        let error = parse("ADD", &[(name, value)], &full().to_string()).unwrap_err().error;
        assert_eq!(error.code, Code::InvalidEnvironment, "{name}={value}");
        assert!(error.msg.contains(name), "{name}={value}: {error}");
    }
    for (name, value) in [("CNI_ARGS", ";IP=;MAC=;;"), ("CNI_IFNAME", "fifteen-letters")] {
        assert_eq!(code("ADD", &[(name, value)], &full()), None, "{name}={value}");
    }
}

#[test]
fn variables_that_are_not_utf8_are_refused_but_paths_need_not_be() {
    let bytes = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
    for (name, fails) in [("CNI_CONTAINERID", true), ("CNI_IFNAME", true), ("CNI_NETNS", false)] {
        let mut all: Vec<(String, OsString)> = variables("ADD")
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.replace("@NS", "/ns").into()))
            .collect();
        all.retain(|(known, _)| known != name);
        all.push((name.to_owned(), bytes(b"/\xff")));
        let parsed = Request::parse(&Environment::of(all), full().to_string().as_bytes());
        assert_eq!(parsed.is_err(), fails, "{name}: {parsed:?}");
    }
}

#[test]
fn an_error_has_the_configurations_version_or_else_the_latest() {
    for (version, answered) in [("0.3.1", "0.3.1"), ("9.9.9", "1.1.0"), ("", "1.1.0")] {
        let config = json!({ "cniVersion": version, "name": "a/b" });
        let rejected = parse("ADD", &[], &config.to_string()).unwrap_err();
        let outcome = Outcome::from(rejected);
        let error: Value = serde_json::from_str(&outcome.stdout).unwrap();
        assert_eq!(error["cniVersion"], answered);
    }
}

#[test]
fn long_details_are_cut_between_characters() {
    let name = "ä".repeat(100_000);
    let config = json!({ "cniVersion": "1.1.0", "name": "shop", name: 1 });
    let outcome = Outcome::from(parse("ADD", &[], &config.to_string()).unwrap_err());
    let error: Map<String, Value> = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(error["code"], 2);
    assert!(outcome.stdout.len() < 20_000, "{}", outcome.stdout.len());
}

#[test]
fn standard_input_is_read_up_to_a_limit() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("torn"))
        }
    }
    assert_eq!(read_config(&b"{}"[..]).unwrap(), b"{}");
    assert_eq!(read_config(Broken).unwrap_err().code, Code::Io);
    assert_eq!(read_config(io::repeat(b' ')).unwrap_err().code, Code::InvalidConfig);
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,40}".prop_map(Value::from),
        "[0-9a-f:./]{0,24}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((".{0,12}", inner), 0..4)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

fn any_value() -> impl Strategy<Value = OsString> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..64).prop_map(OsString::from_vec),
        "[A-Za-z0-9_=;,:./ -]{0,64}".prop_map(OsString::from),
        Just(OsString::from("@NS")),
    ]
}

/// Runs the plugin; panics if it breaks the specification's rules for its output.
fn outcome(environment: &Environment, stdin: &[u8]) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let run = runtime.block_on(Machine::new().run(environment, stdin, &Fake::working()));
    let outcome = run.outcome;
    match outcome.exit_code {
        0 if outcome.stdout.is_empty() => {}
        0 => drop(serde_json::from_str::<Map<String, Value>>(&outcome.stdout).unwrap()),
        _ => {
            let error: Map<String, Value> = serde_json::from_str(&outcome.stdout).unwrap();
            assert!(error["code"].as_u64().unwrap() > 0, "{error:?}");
            assert!(!error["msg"].as_str().unwrap().is_empty(), "{error:?}");
            assert!(error["cniVersion"].is_string(), "{error:?}");
        }
    }
    outcome
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_bytes_and_no_variables_make_it_panic(
        command in 0..COMMANDS.len() + 1,
        values in prop::collection::vec(any_value(), 5),
        stdin in prop::collection::vec(any::<u8>(), 0..256),
    ) {
        let command = COMMANDS.get(command).map_or(values[0].clone(), OsString::from);
        let names = ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS", "CNI_PATH"];
        let variables = names.into_iter().zip(values).chain([("CNI_COMMAND", command)]);
        outcome(&Environment::of(variables), &stdin);
    }

    #[test]
    fn no_change_of_a_configuration_makes_it_panic_or_keeps_a_container_from_ending(
        command in 0..COMMANDS.len(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any_json()), 1..4),
    ) {
        let pointers = all_pointers();
        let mut config = full();
        for (index, value) in changes {
            // A field inside one that has just been replaced is gone.
            if let Some(field) = config.pointer_mut(index.get(pointers.as_slice()).as_str()) {
                *field = value;
            }
        }
        let environment = Environment::of(variables(COMMANDS[command]).into_iter().map(|(name, value)| {
            (name, value.replace("@NS", "/proc/self/ns/net"))
        }));
        let outcome = outcome(&environment, config.to_string().as_bytes());
        if matches!(COMMANDS[command], "DEL" | "VERSION") {
            prop_assert_eq!(outcome.exit_code, 0);
        }
    }
}
