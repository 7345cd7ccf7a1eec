#![allow(clippy::unwrap_used, clippy::needless_pass_by_value)]

use serde_json::json;

use super::*;

/// A base chain of policy drop, and its rules' expressions as `nft -j` shows them.
fn chain(family: &str, table: &str, hook: &str, policy: &str, rules: &[Value]) -> Vec<Value> {
    let base =
        json!({ "family": family, "table": table, "name": "c", "hook": hook, "policy": policy });
    let rule = |expr: &Value| json!({ "rule": { "family": family, "table": table, "chain": "c", "expr": expr } });
    std::iter::once(json!({ "chain": base })).chain(rules.iter().map(rule)).collect()
}

fn found(objects: Vec<Value>, handed: bool, ipsec: bool) -> Vec<(String, String)> {
    let bridges = vec![bridge("weft", &["10.32.0.0/12", "fd00:1::/64"])];
    found_on(bridges, objects, handed, ipsec)
}

fn bridge(name: &str, ranges: &[&str]) -> CarriedBridge {
    let ranges = ranges.iter().map(|range| range.parse().unwrap()).collect();
    CarriedBridge { name: name.to_owned(), ranges }
}

fn found_on(
    bridges: Vec<CarriedBridge>,
    objects: Vec<Value>,
    handed: bool,
    ipsec: bool,
) -> Vec<(String, String)> {
    let found = obstacles(&Listing(objects), &Carried { bridges, ipsec }, [handed; 2]);
    found.into_iter().map(|it| (it.chain, it.remedy)).collect()
}

fn remedies(objects: Vec<Value>, handed: bool, ipsec: bool) -> Vec<String> {
    found(objects, handed, ipsec).into_iter().map(|(_, remedy)| remedy).collect()
}

fn matches(left: Value, op: &str, right: Value) -> Value {
    json!({ "match": { "op": op, "left": left, "right": right } })
}

fn meta(key: &str, right: Value) -> Value {
    matches(json!({ "meta": { "key": key } }), "==", right)
}

fn port(right: Value) -> Value {
    matches(json!({ "payload": { "protocol": "udp", "field": "dport" } }), "==", right)
}

fn established() -> Value {
    let state = json!({ "ct": { "key": "state" } });
    json!([matches(state, "in", json!(["established", "related"])), { "accept": null }])
}

#[test]
fn a_chain_that_drops_bridged_frames_is_named_with_the_rule_to_add() {
    let firewall = || chain("inet", "labfw", "forward", "drop", &[established()]);
    let rule = "nft insert rule inet labfw c iifname \"weft\" oifname \"weft\" accept";
    let expected = vec![("inet labfw c".to_owned(), rule.to_owned())];
    assert_eq!(found(firewall(), true, false), expected, "once, though for both families");
    assert_eq!(found(firewall(), false, false), [], "br_netfilter is off");
    let accepted = json!([
        meta("iifname", json!("weft")),
        meta("oifname", json!("we*")),
        { "counter": { "packets": 0, "bytes": 0 } },
        { "accept": null },
    ]);
    let mended = chain("inet", "labfw", "forward", "drop", &[accepted, established()]);
    assert_eq!(found(mended, true, false), []);
    // Whether it lets the frames pass is not known.
    let unsure = json!([{ "xt": { "type": "match", "name": "conntrack" } }, { "accept": null }]);
    assert_eq!(found(chain("ip", "filter", "forward", "drop", &[unsure]), true, false), []);
    assert_eq!(found(chain("inet", "weft-guard", "forward", "drop", &[]), true, false), []);
    let bridge = chain("bridge", "b", "forward", "drop", &[]);
    assert_eq!(
        remedies(bridge, false, false),
        ["nft insert rule bridge b c meta ibrname \"weft\" accept"]
    );
}

#[test]
fn the_bridge_of_each_network_is_looked_at_and_all_of_them_do_not_hide_the_input() {
    let accepted = |name: &str| {
        let names = ["iifname", "oifname"].map(|key| meta(key, json!(name)));
        json!([names[0], names[1], { "accept": null }])
    };
    let firewall = |rules: &[Value]| chain("inet", "fw", "forward", "drop", rules);
    let (weft, shop) = (bridge("weft", &["10.32.0.0/12"]), bridge("weft-br-8d9001", &[]));
    let both = || vec![weft.clone(), shop.clone()];
    let rule =
        |it: &str| format!("nft insert rule inet fw c iifname \"{it}\" oifname \"{it}\" accept");
    let remedies = |rules: &[Value]| -> Vec<String> {
        let found = found_on(both(), firewall(rules), true, false);
        found.into_iter().map(|(_, remedy)| remedy).collect()
    };
    assert_eq!(remedies(&[]), [rule("weft"), rule("weft-br-8d9001")]);
    assert_eq!(remedies(&[accepted("weft")]), [rule("weft-br-8d9001")]);
    assert_eq!(remedies(&[accepted("weft"), accepted("weft-br-8d9001")]), [""; 0]);
    // Each network's own range is the one that is not to be translated.
    let nat = chain("ip", "nat", "postrouting", "accept", &[json!([{ "masquerade": null }])]);
    let tills = bridge("weft-br-000007", &["10.9.0.0/24"]);
    let found = found_on(vec![tills], nat, true, false);
    assert!(found[0].1.contains("ip saddr 10.9.0.0/24 oifname \"weft-br-000007\""), "{found:?}");

    let many = (0..300).map(|n| bridge(&format!("weft-br-{n:06x}"), &[])).collect();
    let mut objects = firewall(&[]);
    objects.extend(chain("inet", "in", "input", "drop", &[]));
    let found = found_on(many, objects, true, false);
    assert_eq!(found.len(), OBSTACLES_MAX);
    assert!(found.iter().any(|(chain, _)| chain == "inet in c"), "{found:?}");
}

#[test]
fn translation_of_all_and_reverse_path_filters_are_named() {
    let all = chain("ip", "nat", "postrouting", "accept", &[json!([{ "masquerade": null }])]);
    let rule = "nft insert rule ip nat c ip saddr 10.32.0.0/12 oifname \"weft\" accept";
    assert_eq!(remedies(all, true, false), [rule]);
    let iptables = json!([{ "xt": { "type": "target", "name": "MASQUERADE" } }]);
    assert_eq!(
        remedies(chain("ip", "nat", "postrouting", "accept", &[iptables]), true, false),
        [rule]
    );
    let source = json!({ "payload": { "protocol": "ip", "field": "saddr" } });
    let docker = json!([
        matches(source, "==", json!({ "prefix": { "addr": "172.17.0.0", "len": 16 } })),
        matches(json!({ "meta": { "key": "oifname" } }), "!=", json!("docker0")),
        { "masquerade": null },
    ]);
    assert_eq!(found(chain("ip", "nat", "postrouting", "accept", &[docker]), true, false), []);
    let reverse = json!([
        meta("nfproto", json!("ipv6")),
        matches(json!({ "fib": { "result": "oif", "flags": ["saddr", "mark", "iif"] } }), "==", json!(false)),
        { "drop": null },
    ]);
    let firewalld = chain("inet", "firewalld", "prerouting", "accept", &[reverse]);
    assert_eq!(
        remedies(firewalld, true, false),
        ["nft insert rule inet firewalld c iifname \"weft\" accept"]
    );
}

#[test]
fn an_input_chain_is_asked_for_what_comes_and_for_what_ipsec_has_opened() {
    let known = json!({ "set": [
        ["established", { "accept": null }], ["related", { "accept": null }], ["invalid", { "drop": null }],
    ] });
    let states = json!([{ "vmap": { "key": { "ct": { "key": "state" } }, "data": known } }]);
    let loopback = json!([meta("iifname", json!("lo")), { "accept": null }]);
    let icmp =
        json!([meta("l4proto", json!({ "set": ["icmp", "ipv6-icmp"] })), { "accept": null }]);
    let esp = json!([meta("l4proto", json!("esp")), { "accept": null }]);
    let outer = json!([port(json!({ "range": [6783, 6786] })), { "accept": null }]);
    let opened = json!([
        port(json!({ "set": [6787, 6788] })),
        meta("ipsec", json!(true)),
        { "accept": null },
    ]);
    let firewall = |rules: &[&Value], ipsec| {
        let rules: Vec<Value> =
            [&states, &loopback, &icmp].iter().chain(rules).map(|it| (*it).clone()).collect();
        remedies(chain("inet", "fw", "input", "drop", &rules), false, ipsec)
    };
    let insert = |what: &str| format!("nft insert rule inet fw c {what} accept");
    let (outer_rule, esp_rule) = (insert("udp dport 6783-6786"), insert("meta l4proto esp"));
    let opened_rule = insert("udp dport { 6787, 6788 } meta ipsec exists");
    assert_eq!(firewall(&[], false), std::slice::from_ref(&outer_rule));
    assert_eq!(firewall(&[], true), [outer_rule, esp_rule, opened_rule.clone()]);
    assert_eq!(firewall(&[&outer, &esp], true), [opened_rule]);
    assert_eq!(firewall(&[&outer, &esp, &opened], true), [""; 0]);
    let rejects = json!([{ "reject": { "type": "icmpx", "expr": "admin-prohibited" } }]);
    let open = chain("inet", "fw", "input", "accept", &[rejects]);
    assert_eq!(remedies(open, false, false), [insert("udp dport 6783-6786")]);
}

#[test]
fn jumps_are_followed_and_what_is_not_understood_lets_pass() {
    let jump = |kind: &str| json!([{ kind: { "target": "zone" } }]);
    let zone = |expr: Value| json!({ "rule": { "family": "inet", "table": "fw", "chain": "zone", "expr": expr } });
    let firewall = |kind: &str, expr: Value, last: &[Value]| {
        let rules: Vec<Value> = std::iter::once(jump(kind)).chain(last.iter().cloned()).collect();
        let mut objects = chain("inet", "fw", "input", "accept", &rules);
        objects.push(zone(expr));
        found(objects, false, false).len()
    };
    let drop = || json!([{ "drop": null }]);
    assert_eq!(firewall("jump", drop(), &[]), 1);
    assert_eq!(firewall("jump", json!([{ "return": null }]), &[drop()]), 1);
    assert_eq!(firewall("goto", json!([{ "return": null }]), &[drop()]), 0);
    assert_eq!(firewall("jump", json!([{ "accept": null }]), &[drop()]), 0);
    assert_eq!(
        firewall("jump", json!([{ "limit": { "rate": 5 } }, { "accept": null }]), &[drop()]),
        0
    );
    assert_eq!(firewall("jump", json!([port(json!("@mine")), { "accept": null }]), &[drop()]), 0);
    assert_eq!(firewall("jump", jump("jump"), &[]), 0, "for ever");
    // Senseless listings are none.
    for object in [json!(7), json!({ "chain": 7 }), json!({ "rule": [] }), json!(null)] {
        assert_eq!(found(vec![object], true, true), []);
    }
}
