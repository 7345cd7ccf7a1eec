//! IPsec policies, which a kernel has without ESP too. The states are tested in the virtual machine.

use std::{net::IpAddr, time::Duration};

use weft_kernel::{
    KernelError,
    xfrm::{EntryPolicy, LaneGroup, PolicyId, PolicySpec, Removed, Template, Xfrm, XfrmEvent},
};

use crate::lab::{on_a_host, run};

fn id(number: u8, port: u16) -> PolicyId {
    let source: IpAddr = "10.1.0.1".parse().unwrap();
    PolicyId { source, destination: format!("10.2.0.{number}").parse().unwrap(), port }
}

fn to(id: PolicyId, spi: u32) -> PolicySpec {
    PolicySpec { id, template: Template::State { spi } }
}

async fn set(xfrm: &Xfrm, specs: &[PolicySpec]) {
    for result in xfrm.set_policies(specs).await {
        result.unwrap();
    }
}

fn shown() -> String {
    run("ip", &["xfrm", "policy"])
}

#[test]
fn a_policy_is_made_replaced_and_removed() {
    on_a_host(|| async {
        let xfrm = Xfrm::open().unwrap();
        set(&xfrm, &[to(id(1, 6787), 0x1000), to(id(1, 6788), 0x2000)]).await;
        let text = shown();
        assert!(text.contains("src 10.1.0.1/32 dst 10.2.0.1/32 proto udp dport 6787"), "{text}");
        assert!(text.contains("dir out priority 0"), "{text}");
        assert!(
            text.contains("proto esp spi 0x00001000 reqid 1464157780 mode transport"),
            "{text}"
        );
        assert!(
            !text.contains("level use"),
            "without its state a packet would go unsealed: {text}"
        );

        let group = LaneGroup::new(7).unwrap();
        let lanes = PolicySpec { id: id(1, 6788), template: Template::Lanes(group) };
        set(&xfrm, &[to(id(1, 6787), 0x3000), lanes]).await;
        let text = shown();
        assert!(text.contains("spi 0x00003000") && !text.contains("0x00001000"), "{text}");
        assert!(text.contains("proto esp reqid 1464139783 mode transport"), "{text}");
        let mut own = xfrm.own_policies().await.unwrap();
        own.sort_by_key(|spec| spec.id);
        assert_eq!(own, [to(id(1, 6787), 0x3000), lanes]);

        let results = xfrm.remove_policies(&[id(1, 6787), id(2, 6787), id(1, 6788)]).await;
        let removed: Vec<_> = results.into_iter().map(Result::unwrap).collect();
        assert_eq!(removed, [true, false, true]);
        assert_eq!(shown(), "");
    });
}

#[test]
fn a_foreign_policy_is_neither_replaced_nor_removed() {
    on_a_host(|| async {
        let xfrm = Xfrm::open().unwrap();
        let words = "xfrm policy add src 10.1.0.1 dst 10.2.0.1 proto udp dport 6787 dir out tmpl \
                     src 10.1.0.1 dst 10.2.0.1 proto esp reqid 7 mode transport";
        run("ip", &words.split_whitespace().collect::<Vec<_>>());
        let foreign = shown();
        let results = xfrm.set_policies(&[to(id(1, 6787), 1000), to(id(2, 6787), 1000)]).await;
        let error = results[0].as_ref().unwrap_err();
        assert!(matches!(error, KernelError::PolicyTaken { port: 6787, .. }), "{error}");
        assert!(results[1].is_ok());
        assert!(!xfrm.remove_policies(&[id(1, 6787)]).await.pop().unwrap().unwrap());
        let removed = xfrm.remove_own().await.unwrap();
        assert_eq!(removed, Removed { states: 0, policies: 1 });
        assert_eq!(shown(), foreign);
    });
}

#[test]
fn calls_given_up_do_not_disturb_the_next() {
    on_a_host(|| async {
        let xfrm = Xfrm::open().unwrap();
        let many: Vec<_> = (1..=200).map(|number| to(id(number, 6787), 0x1000)).collect();
        for _ in 0..10 {
            // Polls once: the request is sent, and the answer is not awaited.
            let _ = tokio::time::timeout(Duration::ZERO, xfrm.set_policies(&many)).await;
            let _ = tokio::time::timeout(Duration::ZERO, xfrm.own_policies()).await;
        }
        set(&xfrm, &many).await;
        let mut own = xfrm.own_policies().await.unwrap();
        own.sort_by_key(|spec| spec.id);
        assert_eq!(own, many);
        assert_eq!(xfrm.remove_own().await.unwrap().policies, many.len());
    });
}

#[test]
fn changes_of_policies_by_others_are_reported() {
    on_a_host(|| async {
        let xfrm = Xfrm::open().unwrap();
        let mut watch = xfrm.watch().unwrap();
        set(&xfrm, &[to(id(1, 6787), 0x1000), to(id(2, 6787), 0x1000)]).await;
        set(&xfrm, &[to(id(1, 6787), 0x2000)]).await;
        let words = "xfrm policy delete src 10.1.0.1 dst 10.2.0.1 proto udp dport 6787 dir out";
        run("ip", &words.split_whitespace().collect::<Vec<_>>());
        let policy = id(1, 6787);
        assert_eq!(watch.next().await.unwrap(), XfrmEvent::PolicyRemoved { policy });
        run("ip", &["xfrm", "policy", "flush"]);
        assert_eq!(watch.next().await.unwrap(), XfrmEvent::PoliciesFlushed);
    });
}

#[test]
fn inbound_policies_are_made_as_wanted_and_mended() {
    on_a_host(|| async {
        let entry = |source: &str, prefix: u8, plain: bool| EntryPolicy {
            source: source.parse().unwrap(),
            prefix,
            port: 6787,
            plain,
        };
        let all = [entry("0.0.0.0", 0, false), entry("::", 0, false)];
        let peers = [entry("10.2.0.1", 32, true), entry("fd00::", 48, true)];
        let wanted = [&all[..], &peers].concat();
        let xfrm = Xfrm::open().unwrap();
        let mut watch = xfrm.watch().unwrap();
        set(&xfrm, &[to(id(1, 6787), 0x1000)]).await;
        assert_eq!(xfrm.set_entry_policies(&wanted).await.unwrap(), 4);
        let text = shown();
        for part in [
            "src ::/0 dst ::/0 proto udp dport 6787 \n\tdir in priority 1",
            "src 10.2.0.1/32 dst 0.0.0.0/0 proto udp dport 6787 \n\tdir in priority 0",
            "proto esp reqid 1464157780 mode transport\n\ttmpl",
            "proto esp reqid 1464157780 mode transport\n\t\tlevel use",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        // Nothing is written again, and outbound policies are others.
        assert_eq!(xfrm.set_entry_policies(&wanted).await.unwrap(), 0);
        assert_eq!(xfrm.own_policies().await.unwrap(), [to(id(1, 6787), 0x1000)]);
        let everything = shown();
        for damage in [
            "delete src 10.2.0.1/32 dst 0.0.0.0/0 proto udp dport 6787 dir in",
            "update src ::/0 dst ::/0 proto udp dport 6787 dir in priority 1 \
             tmpl proto esp reqid 1464157780 mode transport level use",
        ] {
            let words = format!("xfrm policy {damage}");
            run("ip", &words.split_whitespace().collect::<Vec<_>>());
            assert_eq!(watch.next().await.unwrap(), XfrmEvent::EntryRemoved, "{damage}");
            assert!(xfrm.set_entry_policies(&wanted).await.unwrap() > 0, "{damage}");
            let lines = |text: &str| {
                let mut lines: Vec<_> = text.lines().map(ToOwned::to_owned).collect();
                lines.sort();
                lines
            };
            assert_eq!(lines(&shown()), lines(&everything), "{damage}");
        }
        assert_eq!(xfrm.set_entry_policies(&all).await.unwrap(), 2);
        assert!(!shown().contains("level use\nsrc"), "{}", shown());
        assert_eq!(xfrm.remove_own().await.unwrap(), Removed { states: 0, policies: 3 });
        // Another program's policy stays.
        let words = "xfrm policy add src ::/0 dst ::/0 proto udp dport 6787 dir in action block";
        run("ip", &words.split_whitespace().collect::<Vec<_>>());
        let foreign = shown();
        let error = xfrm.set_entry_policies(&all[1..]).await.unwrap_err();
        assert!(matches!(error, KernelError::EntryTaken { port: 6787, .. }), "{error}");
        assert_eq!(shown(), foreign);
    });
}

#[test]
fn a_kernel_without_esp_says_so() {
    on_a_host(|| async {
        let xfrm = Xfrm::open().unwrap();
        match xfrm.support().await {
            Ok(support) => assert!(!support.ciphers.is_empty()),
            Err(error) => {
                assert!(matches!(error, KernelError::NoEsp { family: "IPv4" }), "{error}");
                assert!(error.to_string().contains("esp4"), "{error}");
            }
        }
        assert_eq!(run("ip", &["xfrm", "state"]), "");
    });
}
